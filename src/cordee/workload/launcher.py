"""The launcher in a job's command, which starts ranks itself: torchrun, accelerate, deepspeed."""

import re
import shlex
from collections.abc import Sequence

_NODE_PROGRAMS = {"torchrun", "accelerate", "deepspeed"}
_NODE_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate.commands.launch": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
}
_PREFIXES = {"exec", "env", "nohup", "nice", "time", "command", "uv", "poetry", "run"}
SEARCH_PATHS = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH")
"""Variables by which a command finds programs, libraries and modules: the submitter's are those of the job."""

ARTIFACTS_ENV = "CORDEE_ARTIFACTS"
"""The environment variable with the folder in which a node has fetched the chunks of its ranks' artifacts."""

PYTHON = re.compile(r"python[0-9.]*")
_OTHER_PATH = re.compile(r"\b(uv|poetry) |\bPATH=")
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)
_SEPARATORS = {";", "&&", "||", "|", "&", "(", ")", "|&", ";;"}


def launcher_of(run: str | Sequence[str]) -> str | None:
    """Return the launcher in a command, which starts ranks itself; None if there is none.

    >>> launcher_of("cd src && OMP_NUM_THREADS=1 torchrun --nproc_per_node=4 train.py")
    'torchrun'
    >>> launcher_of(["python", "-m", "torch.distributed.run", "train.py"])
    'torchrun'
    >>> launcher_of("python train.py --backend deepspeed")
    """
    for command in commands_of(run):
        name = _program(command[0])
        if name in _NODE_PROGRAMS:
            return name
        if not PYTHON.fullmatch(name):
            continue
        rest = iter(command[1:])
        for word in rest:
            if word == "-m":
                module = next(rest, "")
                if module in _NODE_MODULES or module in _NODE_PROGRAMS:
                    return _NODE_MODULES.get(module, module)
                break
            if not word.startswith("-"):
                if _program(word) in _NODE_PROGRAMS:
                    return _program(word)
                break
    return None


def interpreter_of(run: str | Sequence[str]) -> str | None:
    """Return the word of a command that names its Python: an interpreter, or a launcher's script; None: not known.

    >>> interpreter_of("cd src && OMP_NUM_THREADS=1 torchrun --nproc_per_node=4 train.py")
    'torchrun'
    >>> interpreter_of(["/opt/env/bin/python", "train.py"])
    '/opt/env/bin/python'
    >>> interpreter_of(". env/bin/activate && python train.py")
    >>> interpreter_of("uv run python train.py")
    """
    if _OTHER_PATH.search(run if isinstance(run, str) else " ".join(map(str, run))):
        return None
    command = next((each for each in commands_of(run) if each[0] != "cd"), [""])
    name = _program(command[0])
    return command[0] if PYTHON.fullmatch(name) or name in _NODE_PROGRAMS else None


def commands_of(run: str | Sequence[str]) -> list[list[str]]:
    """Return the simple commands of a command line, without assignments and prefixes such as `exec` or `uv run`."""
    if isinstance(run, str):
        lexer = shlex.shlex(run.replace("\n", " ; "), posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:
            return []  # the shell will report the error
    else:
        words = [str(word) for word in run]
    commands: list[list[str]] = [[]]
    for word in words:
        if isinstance(run, str) and word in _SEPARATORS:
            commands.append([])
        elif commands[-1] or not (_ASSIGNMENT.fullmatch(word) or word in _PREFIXES):
            commands[-1].append(word)
    return [command for command in commands if command]


def _program(path: str) -> str:
    """Return the name at the end of a program's path."""
    return path.rpartition("/")[2]
