"""Delivers a notice: to a command, a webhook and by e-mail, as the settings say."""

import os
import smtplib
import ssl
from email.message import EmailMessage
from email.utils import formatdate, make_msgid
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

from graftwork.cycle.settings import EmailSettings, NotifySettings
from graftwork.cycle.state import Notice
from graftwork.process.alert import check_webhook, post, run_command, split_command
from graftwork.records.errors import UserMistake
from graftwork.text.redact import publish_text

_MAIL_SECONDS = 20.0


def send_notice(notice: Notice, settings: NotifySettings) -> str:
    """Why it failed, or nothing. A channel that took it may get it again if another one failed."""
    body = notice.model_dump_json(exclude={"tries", "not_before"}).encode()
    failures = []
    try:
        if settings.command and (failure := run_command(split_command(settings.command), body)):
            failures.append(f"the command {publish_text(failure)}")
        if settings.webhook and (failure := post(check_webhook(settings.webhook), body)):
            failures.append(f"the webhook at {urlsplit(settings.webhook).hostname} {failure}")
    except UserMistake as mistake:
        failures.append(mistake.what)
    if settings.email is not None and (failure := _mail(notice, settings.email)):
        failures.append(failure)
    return "; ".join(failures)


def _mail(notice: Notice, settings: EmailSettings) -> str:
    server = MailServer(
        settings.host,
        settings.port,
        settings.security,
        settings.user,
        os.environ.get(settings.password_env or "", "") or None,
    )
    lines = [notice.what, notice.why, notice.fix, f"project {notice.project}, cycle {notice.cycle}"]
    return send_mail(
        server,
        sender=settings.sender,
        to=settings.to,
        subject=f"[graft {notice.project}] {notice.what}",
        text="\n".join(line for line in lines if line) + "\n",
        # The same notice is the same message, however often it is sent.
        message_id=f"<{notice.project}.{notice.id}.{int(notice.at)}@graftwork>",
    )


class MailServer(NamedTuple):
    host: str
    port: int
    security: Literal["starttls", "tls", "none"]
    user: str | None = None
    password: str | None = None


def send_mail(
    server: MailServer, *, sender: str, to: tuple[str, ...], subject: str, text: str, message_id: str = ""
) -> str:
    """Send it by SMTP. Certificates are checked. A login is only sent over an encrypted connection."""
    message = EmailMessage()
    message["From"], message["To"] = sender, ", ".join(to)
    # A line break in a subject would begin another header.
    message["Subject"] = " ".join(subject.split())[:200]
    message["Date"], message["Message-ID"] = formatdate(), message_id or make_msgid()
    message.set_content(text)
    try:
        with _connect(server) as connection:
            if server.user is not None:
                if server.security == "none":
                    return "a login is not sent without encryption"
                connection.login(server.user, server.password or "")
            connection.send_message(message)
    except (OSError, smtplib.SMTPException) as error:
        # The text of a refused login may repeat it.
        reason = type(error).__name__ if isinstance(error, smtplib.SMTPAuthenticationError) else str(error)
        return f"the mail server {server.host} failed: {reason[:200]}"
    return ""


def _connect(server: MailServer) -> smtplib.SMTP:
    if server.security == "tls":
        return smtplib.SMTP_SSL(
            server.host, server.port, timeout=_MAIL_SECONDS, context=ssl.create_default_context()
        )
    connection = smtplib.SMTP(server.host, server.port, timeout=_MAIL_SECONDS)
    if server.security == "starttls":
        connection.starttls(context=ssl.create_default_context())
    return connection
