"""What others published about their softmax: a kernel's reference and tables of bandwidth."""

from pathlib import Path

import pandas as pd
from torch import Tensor


def softmax_argmax(x: Tensor) -> Tensor:
    """The naive softmax as it is usually published."""
    row_max = x.max(dim=1)[0]
    numerator = (x - row_max[:, None]).exp()
    return numerator / numerator.sum(dim=1)[:, None]


def load_bandwidth() -> pd.DataFrame:
    """The bandwidths that others printed for their softmax kernels.

    Columns: `source`, `series`, `n_rows`, `n_cols`, `gb_per_s` (2MN elements of float32 over the
    time). The sources are those of the chapter that shows them; most do not name their GPU.
    """
    return pd.read_csv(Path(__file__).with_name("published_bandwidth.csv"))
