"""A process of its own for a trace: a question on standard input, an answer or an error on standard output, as JSON."""

import json
import os
import sys

from cordee.errors import CordeeError, MissingExtraError
from cordee.imports import end_uncollected, uncollected
from cordee.train.trace_memory.question import Question


def main() -> None:
    """Answer one question."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    question = Question.read(json.load(sys.stdin))
    try:
        print(json.dumps(_answer(question)))
    except CordeeError as error:
        print(json.dumps({"error": error.message, "hint": error.hint, "exit_code": error.exit_code}))
        sys.exit(error.exit_code)


def _answer(question: Question) -> dict[str, object]:
    with uncollected():
        try:
            import torch  # noqa: F401
        except ImportError:
            hint = "install torch, its CPU build is enough: no GPU is asked for"
            raise MissingExtraError(
                "a trace runs the model's own code in torch, which is not installed", hint=hint
            ) from None
        from cordee.train.trace_memory.trace import trace

    return trace(question).document()


if __name__ == "__main__":
    end_uncollected()
    main()
