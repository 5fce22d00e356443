"""`make bench`: run the benchmarks, print a table, end with one line of JSON.

Usage: python -m tests.bench [NAME ...]
"""

import importlib
import json
import sys

NAMES = ("transfer",)


def main() -> None:
    results = []
    for name in sys.argv[1:] or NAMES:
        result = importlib.import_module(f"tests.bench.{name}").main()
        results.append(result)
        width = max(map(len, result))
        for key, value in result.items():
            shown = f"{value:.3f}" if isinstance(value, float) else value
            print(f"{key:{width}}  {shown}", flush=True)
    print(json.dumps({"benchmarks": results}))


if __name__ == "__main__":
    main()
