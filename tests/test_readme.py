"""The README's Python blocks run, one after the other in one session, as it says."""

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_python_blocks_run_in_order():
    text = README.read_text()
    session = {"__name__": "readme"}
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    assert len(blocks) > 5
    for block in blocks:
        first_line = text.count("\n", 0, block.start(1))
        # Blank lines in front: an error shows the line of the README.
        exec(compile("\n" * first_line + block[1], str(README), "exec"), session)
