"""Start servers quickly: a process that has imported everything once forks a server for each line of its input.

{"home", "slots", "env", "kill_after_s"}   starts a server; answered when it is ready or dead
{"wait": pid}                              answered with how the server ended
"""

import json
import os
import signal
import sys
import threading

from cordee.control import server


def _start(request: dict[str, object]) -> dict[str, object]:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        os.dup2(write, 1)
        os.close(write)
        env = request["env"]
        assert isinstance(env, dict)
        os.environ.update(env)
        os.setsid()
        after_s = request["kill_after_s"]
        if isinstance(after_s, float):
            timer = threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL))
            timer.daemon = True  # a server that has ended does not wait for it
            timer.start()
        code = 1
        try:
            code = server.main(["--home", str(request["home"]), "--slots", str(request["slots"])])
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as said:
        line = said.readline()
    return {"pid": pid, "said": json.loads(line) if line else None}


def main() -> None:
    """Serve until the test's end of the pipe closes."""
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            answer: dict[str, object] = {"code": os.waitstatus_to_exitcode(status)}
        else:
            answer = _start(request)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
