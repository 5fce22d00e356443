"""`make bench`: run the benchmarks, print a table, end with one line of JSON.

Usage: python -m tests.bench [NAME ...]
"""

import importlib
import json
import sys

NAMES = ("transfer", "engine", "scale", "verification")


def main() -> None:
    results = []
    for name in sys.argv[1:] or NAMES:
        module = importlib.import_module(f"tests.bench.{name}")
        result = module.main()
        results.append(result)
        rows = module.table(result)
        print(f"{name}, median of {result['rounds']}:", flush=True)
        width = max(len(label) for label, _ in rows)
        for label, figure in rows:
            print(f"  {label:{width}}  {figure}", flush=True)
    print(json.dumps({"benchmarks": results}))


if __name__ == "__main__":
    main()
