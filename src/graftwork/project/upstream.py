"""The graft.yaml of a project that starts in front of a large model, without a log.

In: the address of the API, the model and the variable that holds the key. Out: the file, which `graft serve`
can start with at once.
"""

import re
from pathlib import Path

import yaml

from graftwork.files.disk import write_atomic
from graftwork.project.init import PORT, Started, make_starter
from graftwork.project.load import PROJECT_FILE, load_settings
from graftwork.records.errors import UserError

ENDPOINT = "large"
SERVE = """\
  default_model: {served}
  models:                       # the names that your clients ask for already
    {served}: {{to: {endpoint}}}
    # once there is a release: {served}: {{to: {endpoint}, small: champion, share: 0.1}}
  max_new_tokens: 4096          # for requests that set no limit
  max_new_tokens_limit: 131072
  failover:
    endpoints:
      {endpoint}:
        url: {url}
        model: {model}
"""
KEY = (
    "        api_key_env: {variable}     # the variable that holds the key; the key itself is never stored\n"
)


def start_with_upstream(folder: Path, *, url: str, model: str, api_key_env: str | None) -> Started:
    """Write graft.yaml into the folder. An existing one is never overwritten."""
    path = folder / PROJECT_FILE
    if path.exists():
        raise UserError(
            f"there is a {PROJECT_FILE} already",
            why="an existing file is never overwritten",
            fix="add the upstream under serve.failover.endpoints and serve.models, or use another folder "
            "with -C",
            where=str(path),
        )
    served = re.sub(r"[^\w./:@-]", "-", model, flags=re.ASCII)[:128]
    serve = PORT + SERVE.format(
        served=_quote(served), endpoint=ENDPOINT, url=_quote(url), model=_quote(model)
    )
    key = "" if api_key_env is None else KEY.format(variable=api_key_env)
    write_atomic(path, make_starter(folder) + serve + key)
    try:
        load_settings(path)
    except UserError as error:
        # The corrected command would find it, and overwrites none.
        path.unlink()
        raise UserError(
            error.what, why=error.why, fix="write it as https://host/v1#model", where="--upstream"
        ) from error
    return Started(file=str(path))


def _quote(value: str) -> str:
    return yaml.safe_dump(value, width=100_000, allow_unicode=True).removesuffix("...\n").strip()
