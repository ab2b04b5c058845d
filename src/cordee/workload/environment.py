"""The part of the submitter's environment that its job runs in: all of it but what is the shell's own, or a secret.

A job's environment is a part of its spec, which stands in the log, so secrets stay out of it and its size has a limit.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from cordee.units import KiB
from cordee.workload.launcher import SEARCH_PATHS

VALUE_BYTES_MAX = 16 * KiB
TOTAL_BYTES_MAX = 64 * KiB

# Of the shell, the session, the terminal and the user, whose names a rank has from its agent.
_SHELLS = re.compile(
    r"_|\?|PWD|OLDPWD|SHLVL|SHELL|USER|USERNAME|LOGNAME|HOME|MAIL|HOSTNAME|HOSTTYPE|MACHTYPE|OSTYPE|TMPDIR|TEMP|TMP|TERM.*"
    r"|COLORTERM|COLUMNS|LINES|LS_COLORS|LESS.*|PAGER|EDITOR|VISUAL|HIST.*|PS[0-9]|PROMPT.*|IFS|OPTIND|EUID|UID|PPID"
    r"|BASH.*|ZSH.*|FISH.*|XDG_(?!CACHE_HOME|CONFIG_HOME|DATA_HOME).*|DBUS_.*|DISPLAY|WAYLAND_.*|XAUTHORITY|WINDOWID"
    r"|SSH_.*|SUDO_.*|GPG_.*|TMUX.*|STY|VSCODE_.*|KITTY_.*|ITERM_.*|INVOCATION_ID|JOURNAL_STREAM|PYTEST_.*|GIT_.*|MOTD.*"
)
# Of Cordee and of launchers: a rank gets its own.
_SET_FOR_RANKS = re.compile(
    r"CORDEE_.*|TORCHELASTIC_.*|PET_.*|(LOCAL_|GROUP_|ROLE_|NODE_)?RANK|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE"
    r"|MASTER_(ADDR|PORT)|NNODES|ROLE_NAME|OMP_NUM_THREADS|SLURM.*|CUDA_VISIBLE_DEVICES|CUDA_DEVICE_ORDER"
    r"|TORCH_ELASTIC_SHUTDOWN_TIMEOUT|NVIDIA_VISIBLE_DEVICES"
)
_SECRET = re.compile(
    r".*(SECRET|PASSW|CREDENTIAL|PRIVATE).*|(.*_)?(TOKENS?|KEYS?|APIKEY|PASS|PAT|AUTH|COOKIE)(_.*)?", re.IGNORECASE
)
_PASSWORD_IN_URL = re.compile(r"://[^/@\s]*:[^/@\s]+@")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class SubmittersEnvironment:
    """The variables that a job gets, and the names of those that it does not get although they may matter to it.

    Attributes:
        env: by name.
        secrets: look like secrets.
        large: would exceed a limit of size.
        local: have a path of this machine, and the server is on another one.
    """

    env: Mapping[str, str]
    secrets: tuple[str, ...] = ()
    large: tuple[str, ...] = ()
    local: tuple[str, ...] = ()

    def notes(self) -> list[str]:
        """Return sentences about what was left out.

        >>> SubmittersEnvironment({}, secrets=("HF_TOKEN",)).notes()
        ['HF_TOKEN looks like a secret and is not in the job; to pass it: --secret HF_TOKEN']
        """
        said = []
        for names, one, many, hint in (
            (self.secrets, "looks like a secret", "look like secrets", "--secret"),
            (self.large, "is too large or no UTF-8", "are too large or no UTF-8", "--env"),
            (self.local, "has a path of this machine", "have paths of this machine", "--env"),
        ):
            if names:
                flag = f"{hint} {names[0]}" + ("=..." if hint == "--env" else "")
                are = f"{one} and is" if len(names) == 1 else f"{many} and are"
                said.append(f"{', '.join(names)} {are} not in the job; to pass {_it(names)}: {flag}")
        return said


def submitters_environment(
    environ: Mapping[str, str], *, named: Collection[str] = (), remote: bool = False
) -> SubmittersEnvironment:
    """Return what a job gets of its submitter's environment.

    Args:
        environ: the submitter's environment.
        named: variables that the job's spec has itself, as values or as secrets.
        remote: the server is on another machine, where paths of this one mean nothing. The search paths are sent all
            the same: by them a node finds its own programs or says that it has none.

    >>> found = submitters_environment({"HF_HOME": "/data/hf", "PWD": "/root", "HF_TOKEN": "hf_x"})
    >>> found.env, found.secrets
    ({'HF_HOME': '/data/hf'}, ('HF_TOKEN',))
    """
    env: dict[str, str] = {}
    secrets, large, local = [], [], []
    for name in sorted(environ, key=lambda name: (name not in SEARCH_PATHS, len(environ[name]), name)):
        value = environ[name]
        if name in named or not _NAME.fullmatch(name) or _SHELLS.fullmatch(name) or _SET_FOR_RANKS.fullmatch(name):
            continue
        if name in SEARCH_PATHS:
            env[name] = value
        elif _SECRET.fullmatch(name) or _PASSWORD_IN_URL.search(value):
            secrets.append(name)
        elif remote and any(part.startswith(("/", "~")) for part in value.split(":")):
            local.append(name)
        elif not _is_text(value) or _bytes(value) > VALUE_BYTES_MAX or _bytes(env, value) > TOTAL_BYTES_MAX:
            large.append(name)
        else:
            env[name] = value
    return SubmittersEnvironment(env, tuple(sorted(secrets)), tuple(sorted(large)), tuple(sorted(local)))


def _bytes(*texts: str | Mapping[str, str]) -> int:
    return sum(len(each) if isinstance(each, str) else sum(map(len, [*each, *each.values()])) for each in texts)


def _is_text(value: str) -> bool:
    """Return whether a value is UTF-8; Python hides other bytes in surrogates."""
    return not any("\ud800" <= char <= "\udfff" for char in value)


def _it(names: Collection[str]) -> str:
    return "it" if len(names) == 1 else "one"
