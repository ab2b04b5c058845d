"""Records of the audit log."""

from cordee.answers.view import View


class AuditRecordView(View):
    """A record of the audit log: `who` asked for `operation` on `object`, from `address` by the program `agent`.

    `token` is the id of the token that was shown, and `session` that of the browser's session; neither is a secret.
    `queue` is that of the object, and empty for what belongs to the whole cluster. `outcome` is `done`, `refused` or
    `failed`; `count` above 1 stands for so many equal acts within a minute. `event` is the number that the log had
    after it. `before` is the hash of the record before, and `hash` the SHA-256 of all other fields.
    """

    number: int
    at_us: int
    who: str
    token: str
    session: str
    address: str
    agent: str
    operation: str
    object: str
    queue: str
    outcome: str
    count: int
    event: int | None
    detail: str
    before: str
    hash: str


class AuditView(View):
    """Records of the audit log, oldest first, and its newest record's number and hash as `NUMBER:HASH`.

    `whole` says that the token may see all records: only then the chain of hashes can be followed.
    """

    records: list[AuditRecordView]
    head: str
    whole: bool
