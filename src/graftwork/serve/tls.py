"""TLS from certificate files, read again when they change: a renewed certificate needs no restart."""

import asyncio
import logging
import ssl
from pathlib import Path
from typing import NamedTuple

from graftwork.records.errors import UserMistake

log = logging.getLogger(__name__)


class CertificateFiles(NamedTuple):
    certificate: Path
    key: Path

    def state(self) -> tuple[object, ...]:
        """Changes when a file is written or replaced; None for one that is not there."""
        found: list[object] = []
        for path in self:
            try:
                stat = path.stat()
                found.append((stat.st_mtime_ns, stat.st_size, stat.st_ino))
            except OSError:
                found.append(None)
        return tuple(found)


def open_tls(files: CertificateFiles) -> ssl.SSLContext:
    context = _make_context()
    try:
        context.load_cert_chain(files.certificate, files.key)
    except (OSError, ssl.SSLError) as error:
        raise UserMistake(
            "the TLS certificate cannot be used",
            why=getattr(error, "reason", None) or error.strerror or str(error),
            fix="name the PEM files of a certificate chain and of its key, without a passphrase",
            where=str(files.certificate),
        ) from error
    return context


def _make_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


async def follow_certificate(
    context: ssl.SSLContext, files: CertificateFiles, *, known: tuple[object, ...], seconds: float
) -> None:
    """Load files that are no longer in the state `known` into the context, which new connections use.

    Files that do not fit each other are left alone until they change again.
    """
    while True:
        await asyncio.sleep(seconds)
        state = files.state()
        if state == known:
            continue
        known = state
        try:
            # Tried elsewhere first: a failure would leave a new certificate with the old key.
            _make_context().load_cert_chain(files.certificate, files.key)
            context.load_cert_chain(files.certificate, files.key)
        except (OSError, ssl.SSLError) as error:
            reason = getattr(error, "reason", None) or error.strerror
            log.warning("TLS: the changed certificate cannot be used (%s); the old one stays", reason)
        else:
            log.info("TLS: the certificate was read again")
