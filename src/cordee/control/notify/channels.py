"""The ways of a message to its destination: a webhook, Slack's incoming webhook, e-mail."""

import smtplib
import ssl
from datetime import UTC, datetime
from email.message import EmailMessage
from urllib.parse import unquote, urlsplit

import httpx

from cordee.control.notify.destinations import Destination
from cordee.control.notify.messages import Message
from cordee.errors import ServerError

TIMEOUT_S = 10.0
_SUBJECT_CHARS = 120


def deliver(destination: Destination, message: Message) -> None:
    """Send one message; return once the other side has taken it.

    A webhook gets a POST of JSON with the message's fields; `at` is ISO 8601 in UTC.

    Raises:
        ServerError: it has not, or did not answer in time.
    """
    try:
        if destination.webhook is not None:
            at = datetime.fromtimestamp(message.at_us / 1e6, UTC).isoformat(timespec="milliseconds")
            body = {"id": message.id, "kind": message.kind, "at": at, "job_id": message.job_id}
            _post(destination.webhook, body | {"name": message.name, "owner": message.owner, "text": message.text})
        elif destination.slack is not None:
            _post(destination.slack, {"text": _for_slack(message.text)})
        else:
            _mail(destination, message)
    except (OSError, httpx.HTTPError, httpx.InvalidURL, smtplib.SMTPException) as error:
        raise ServerError(f"{destination.name} took no message: {str(error) or type(error).__name__}") from None


def _post(url: str, body: dict[str, str]) -> None:
    with httpx.Client(timeout=TIMEOUT_S, follow_redirects=False) as client:
        answer = client.post(url, json=body)
    if not answer.is_success:
        raise OSError(f"it answers {answer.status_code} {answer.reason_phrase}")


def _for_slack(text: str) -> str:
    """Return a text in Slack's format: its three special characters escaped, output of a job as code.

    >>> _for_slack("gpt failed: a < b" + chr(10) + "ValueError")
    'gpt failed: a &lt; b\\n```ValueError```'
    """
    first, line, rest = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").partition("\n")
    return f"{first}\n```{rest}```" if line else first


def _mail(destination: Destination, message: Message) -> None:
    assert destination.smtp is not None and destination.email is not None
    server = urlsplit(destination.smtp)
    user, password = unquote(server.username or ""), unquote(server.password or "")
    mail = EmailMessage()
    mail["Subject"] = " ".join(message.text.partition("\n")[0].split())[:_SUBJECT_CHARS]
    mail["From"] = destination.sender or (user if "@" in user else f"cordee@{server.hostname}")
    mail["To"] = destination.email
    mail["Message-ID"] = f"<{message.id.replace('/', '.')}.{message.job_id or 'budget'}@cordee>"
    mail.set_content(message.text)
    host = server.hostname or ""
    if server.scheme == "smtps":
        secure = ssl.create_default_context()
        with smtplib.SMTP_SSL(host, server.port or 465, timeout=TIMEOUT_S, context=secure) as smtp:
            _send(smtp, mail, user, password)
        return
    with smtplib.SMTP(host, server.port or 25, timeout=TIMEOUT_S) as smtp:
        smtp.ehlo()
        if smtp.has_extn("starttls"):
            smtp.starttls(context=ssl.create_default_context())
            smtp.ehlo()
        elif password:
            raise OSError("it offers no STARTTLS, so the password is not sent")
        _send(smtp, mail, user, password)


def _send(smtp: smtplib.SMTP, mail: EmailMessage, user: str, password: str) -> None:
    if password:
        smtp.login(user, password)
    smtp.send_message(mail)
