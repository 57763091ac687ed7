"""lm-eval's own command line, with the models of this package: `python -m unspoken.eval.lm_eval --model unspoken ...`.

lm-eval 0.4.13 imports no plug-ins, so its command knows nothing of a package that is merely installed. After `import
unspoken`, which running this module is, it knows `--model unspoken` (`harness.py`), and `--model hf` loads a folder of
ours. Under `accelerate launch -m` it takes several processes, as lm-eval does.
"""

import sys

from unspoken.errors import UnspokenError, UsageError

INSTALL = "pip install 'unspoken[eval]'"


def main() -> int:
    try:
        from lm_eval.__main__ import cli_evaluate
    except ModuleNotFoundError as error:
        print(f"unspoken: error: {missing(error)}", file=sys.stderr)
        return UsageError.exit_code
    try:
        cli_evaluate()
    except UnspokenError as error:
        print(f"unspoken: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def missing(error: ModuleNotFoundError) -> str:
    return f"lm-eval is needed, and {error.name} is not installed; run `{INSTALL}`"


if __name__ == "__main__":
    sys.exit(main())
