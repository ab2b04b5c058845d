"""Jobs over two kinds of GPU are refused with what to do instead."""

import pytest

from cordee.errors import SpecError
from cordee.workload.gpus import parse_gpus


@pytest.mark.parametrize("written", ["8xH100+8xA100", "4xL4 + 4xT4", "1xH100+1xH200+1xB200"])
def test_a_job_over_several_kinds_is_refused(written: str) -> None:
    with pytest.raises(SpecError, match=r"several kinds of GPU: .* the slower kind sets the pace") as raised:
        parse_gpus(written)
    assert "plan each kind by itself" in str(raised.value.hint)
