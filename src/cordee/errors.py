"""Every error that Cordee raises on purpose, in one tree, with one exit code for each leaf.

    CordeeError                     1
    ├── InputError                 10   something the user wrote
    │   ├── UnitError              11     a bare number, an unknown unit
    │   ├── SpecError              12     a job's YAML, or that of queues
    │   ├── ShapeError             13     a model's config.json
    │   ├── CatalogueError         14     a GPU, model or price that is not known
    │   ├── LayoutError            15     a layout that does not divide
    │   ├── ScriptError            16     the program to run is not there
    │   ├── QueuesError            17     a tree of queues that breaks a rule
    │   ├── TraceError             18     a trace of jobs, or a row of one under --strict
    │   ├── ProfileError           19     a profiler's file
    │   ├── BodyTooLargeError      82     a request with more bytes than the server reads
    │   └── KeyReusedError         83     an idempotency key that came with another request before
    ├── AdmissionError             20   a job that was refused; nothing was queued
    │   ├── DoesNotFitError        21     its model does not fit its GPUs
    │   ├── UnprotectedError       22     preemptible without a checkpoint
    │   ├── DependencyError        24     it starts after a job that has ended otherwise, or after itself
    │   └── TooLargeError          23     a gang larger than the cluster, or than its queue allows
    ├── ServerError                30   between a client and its server
    │   ├── NoServerError          31     none is running, or it does not answer
    │   ├── TokenError             32     wrong or missing token
    │   │   └── NodeLeftError      86     that of a node which has left
    │   ├── HomeInUseError         33     a second server on the same home
    │   ├── HomeUnsuitableError    34     a home on a network file system, or not writable
    │   ├── NotFoundError          35     no such job, node or log
    │   ├── CertificateError       36     the server's certificate is not the expected one
    │   ├── ForbiddenError         37     a token that is good for something else
    │   ├── NameTakenError         38     another machine joined as this node
    │   ├── BusyError              88     something else that goes on must end first
    │   │   └── OverloadedError    84     more such questions wait than the server answers in a while
    │   └── StandbyError           39     the server stands by; another one leads, or none does yet
    ├── StoreError                 40   the database cannot be read or written
    │   └── ReplacedError          41     another server leads: this one may no longer write
    ├── CheckpointError            50   a checkpoint cannot be written or read
    │   ├── FencedError            51     a newer attempt owns the log
    │   ├── CorruptError           52     no generation verifies
    │   ├── DestinationError       53     the place to write to is unusable
    │   └── InUseError             54     another run on this machine writes there
    ├── StopError                  60   the ranks could not agree to stop, or the save ran out of time
    │   └── DivergedError          61     the loss diverged, and the job was told to stop
    ├── DataError                  90   a dataset cannot be read
    │   ├── DataReplacedError      91     an object was replaced, or removed, under its name
    │   ├── DataDamagedError       92     its bytes are not those that its store once gave, or says it has
    │   └── CacheFullError         93     the node's cache has no room
    ├── MissingExtraError          70   an optional library is not installed
    ├── ReplicaError               87   the engine of a service does not start, has ended, or does not answer
    ├── EngineError                85   an engine of machines, such as Slurm, does not do what it is asked
    ├── NoisyError                 81   a calibration was disturbed by what else runs there
    └── ClaimError                 80   a claim of the demo, or a kernel's number, does not hold

75 is not an error: a rank exits with it when it has checkpointed and its job shall be queued again.
"""

from typing import Any

EXIT_CHECKPOINTED = 75


class CordeeError(Exception):
    """An error with the numbers in its message; `hint` says what to do."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class InputError(CordeeError):
    """Something the user wrote cannot be used."""

    exit_code = 10


class UnitError(InputError):
    """A quantity without a unit, or with an unknown one."""

    exit_code = 11


class SpecError(InputError):
    """The YAML of a job or of queues is not valid."""

    exit_code = 12


class ShapeError(InputError):
    """A model's config.json lacks a field or contradicts itself."""

    exit_code = 13


class CatalogueError(InputError):
    """A GPU, model or price is not in the catalogue."""

    exit_code = 14


class LayoutError(InputError):
    """A layout does not divide the model or the GPUs."""

    exit_code = 15


class ScriptError(InputError):
    """The program to run does not exist."""

    exit_code = 16


class QueuesError(InputError):
    """A tree of queues breaks a rule."""

    exit_code = 17


class TraceError(InputError):
    """A trace of jobs cannot be read, or a row of one under `--strict`."""

    exit_code = 18


class ProfileError(InputError):
    """A profiler's file cannot be read."""

    exit_code = 19


class BodyTooLargeError(InputError):
    """A request has more bytes than the server reads."""

    exit_code = 82


class KeyReusedError(InputError):
    """An idempotency key came with another request before."""

    exit_code = 83


class AdmissionError(CordeeError):
    """A job was refused at submission; nothing was queued."""

    exit_code = 20


class DoesNotFitError(AdmissionError):
    """The job's model does not fit its GPUs."""

    exit_code = 21


class UnprotectedError(AdmissionError):
    """A preemptible job has no checkpoint destination, and the risk was not accepted."""

    exit_code = 22


class TooLargeError(AdmissionError):
    """The gang is larger than the cluster, or than its queue ever allows."""

    exit_code = 23


class DependencyError(AdmissionError):
    """A job is to start after one that has ended otherwise, or after itself: it would never start."""

    exit_code = 24


class ServerError(CordeeError):
    """Client and server cannot work together."""

    exit_code = 30


class NoServerError(ServerError):
    """No server runs for this home, or it does not answer."""

    exit_code = 31


class TokenError(ServerError):
    """The token is wrong or missing."""

    exit_code = 32


class NodeLeftError(TokenError):
    """The node has left, so its token is void."""

    exit_code = 86


class HomeInUseError(ServerError):
    """Another server owns this home."""

    exit_code = 33


class HomeUnsuitableError(ServerError):
    """The home directory cannot hold the state."""

    exit_code = 34


class NotFoundError(ServerError):
    """The job, attempt, node or log does not exist."""

    exit_code = 35


class CertificateError(ServerError):
    """The server's certificate is not the expected one, or cannot be used."""

    exit_code = 36


class ForbiddenError(ServerError):
    """The token is valid, but not for this."""

    exit_code = 37


class BusyError(ServerError):
    """Something else that goes on must end first; the same request will do later."""

    exit_code = 88


class OverloadedError(BusyError):
    """More questions of this kind wait than the server answers in a while."""

    exit_code = 84


class NameTakenError(ServerError):
    """Another machine is the node of this name."""

    exit_code = 38


class StandbyError(ServerError):
    """The server stands by and does nothing else; another one leads, or none does yet.

    Attributes:
        leader: the URL of the server that leads.
    """

    exit_code = 39

    def __init__(self, message: str, *, hint: str | None = None, leader: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.leader = leader


class StoreError(CordeeError):
    """The database cannot be read or written."""

    exit_code = 40


class ReplacedError(StoreError):
    """Another server leads the database; this one may no longer write."""

    exit_code = 41


class CheckpointError(CordeeError):
    """A checkpoint cannot be written or read."""

    exit_code = 50


class FencedError(CheckpointError):
    """A newer attempt owns the checkpoint log; this one must stop writing."""

    exit_code = 51


class CorruptError(CheckpointError):
    """No generation of the checkpoint verifies."""

    exit_code = 52


class DestinationError(CheckpointError):
    """The place to write checkpoints to is unusable."""

    exit_code = 53


class InUseError(CheckpointError):
    """Another process on this machine writes to the destination."""

    exit_code = 54


class StopError(CordeeError):
    """The ranks could not agree on a step to stop at, or the save ran out of time."""

    exit_code = 60


class DivergedError(StopError):
    """The loss diverged, and the job was told to stop, or has gone back too often. Another start would not help."""

    exit_code = 61


class DataError(CordeeError):
    """A dataset cannot be read."""

    exit_code = 90


class DataReplacedError(DataError):
    """An object was replaced or removed under its name, after the name was pinned."""

    exit_code = 91


class DataDamagedError(DataError):
    """The bytes of an object are not those that its store once gave, or says it has."""

    exit_code = 92


class CacheFullError(DataError):
    """The node's cache has no room for an object."""

    exit_code = 93


class MissingExtraError(CordeeError):
    """An optional library is not installed."""

    exit_code = 70


class EngineError(CordeeError):
    """An engine of machines, such as Slurm, does not do what it is asked."""

    exit_code = 85


class ReplicaError(CordeeError):
    """The engine of a service does not start, has ended, or does not answer."""

    exit_code = 87


class NoisyError(CordeeError):
    """A calibration is not known well enough, since others used the device."""

    exit_code = 81


class ClaimError(CordeeError):
    """A claim of the demo, or a number of a kernel, does not hold."""

    exit_code = 80


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says, or its name if it says nothing.

    >>> first_line(ValueError("no such shape\\nin a long trace")), first_line(KeyError())
    ('no such shape', 'KeyError')
    """
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def find_error(kind: str) -> type[CordeeError]:
    """Return the error class of this name; `ServerError` for a name from another version."""
    found = globals().get(kind)
    return found if isinstance(found, type) and issubclass(found, CordeeError) else ServerError


def as_body(error: CordeeError) -> dict[str, Any]:
    """Return an error as the API sends it."""
    facts = {"kind": type(error).__name__, "message": error.message, "hint": error.hint}
    return {"error": facts | ({"leader": error.leader} if isinstance(error, StandbyError) else {})}


def from_body(body: Any) -> CordeeError | None:
    """Return the error in a body that `as_body` made; None if the body has no error."""
    found = body.get("error") if isinstance(body, dict) else None
    if not isinstance(found, dict) or "message" not in found:
        return None
    error = find_error(str(found.get("kind")))(str(found["message"]), hint=found.get("hint"))
    if isinstance(error, StandbyError):
        error.leader = found.get("leader")
    return error
