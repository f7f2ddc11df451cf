"""Measures perplexity and KL divergence of models: `python evals/perplexity.py MODEL --reference MODEL`.

The same as `qconvert eval perplexity`, whose library is `qconvert.evaluate`.
"""

from __future__ import annotations

import sys

from qconvert.cli import main

if __name__ == "__main__":
    main(["eval", "perplexity", *sys.argv[1:]])
