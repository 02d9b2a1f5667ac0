"""The benchmarks are not part of the package: they are found beside the tests, or left out."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
if (ROOT / "benchmarks" / "run.py").exists():
    sys.path.append(str(ROOT))  # behind the installed package
else:
    collect_ignore_glob = ["test_*.py"]
