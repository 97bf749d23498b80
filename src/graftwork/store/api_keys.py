"""The API keys of a project: what they may do and the digests of their secrets, never the secrets.

A key is never changed, only revoked; it stays in the list. Does not know who presents a key.
"""

from sqlalchemy import func, select, update

from graftwork.serve.keys import ApiKey
from graftwork.store.database import ProjectTable
from graftwork.store.schema import api_keys

_OWN_COLUMNS = ("id", "name", "digest", "created_at", "revoked_at")


class ApiKeyStore(ProjectTable):
    _read: tuple[object, tuple[ApiKey, ...]] | None = None
    """What was read last, with the version of the keys then."""

    def add(self, key: ApiKey) -> bool:
        """Keep a new key; False if a valid one has its name."""
        with self._database.write() as connection:
            same_name = select(api_keys.c.id).where(
                api_keys.c.project == self._project,
                api_keys.c.name == key.name,
                api_keys.c.revoked_at.is_(None),
            )
            if connection.scalar(same_name) is not None:
                return False
            body = key.model_dump(mode="json", exclude=set(_OWN_COLUMNS))
            columns = {name: getattr(key, name) for name in _OWN_COLUMNS}
            connection.execute(api_keys.insert(), [{"project": self._project, **columns, "body": body}])
        return True

    def revoke(self, key_id: str, *, at: str) -> bool:
        """False if there is no such key or it is revoked already."""
        with self._database.write() as connection:
            changed = connection.execute(
                update(api_keys)
                .where(
                    api_keys.c.project == self._project,
                    api_keys.c.id == key_id,
                    api_keys.c.revoked_at.is_(None),
                )
                .values(revoked_at=at)
            )
            return changed.rowcount == 1

    def list(self) -> tuple[ApiKey, ...]:
        """All of them, the oldest first. The same object as before where nothing has changed."""
        mine = api_keys.c.project == self._project
        changes = select(func.max(api_keys.c.seq), func.count(api_keys.c.revoked_at)).where(mine)
        with self._database.read() as connection:
            # Changes with every key that is created or revoked.
            version = connection.execute(changes).one()
            if self._read is not None and self._read[0] == version:
                return self._read[1]
            rows = connection.execute(select(api_keys).where(mine).order_by(api_keys.c.seq)).all()
        keys = tuple(
            ApiKey.model_validate({**row.body, **{name: getattr(row, name) for name in _OWN_COLUMNS}})
            for row in rows
        )
        self._read = (version, keys)
        return keys
