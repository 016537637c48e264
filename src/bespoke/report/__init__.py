"""Reports: summaries, comparison tables and charts, read from run folders alone."""

from bespoke.report.charts import client_chart, curves
from bespoke.report.columns import Columns, client_table, curve_table
from bespoke.report.compare import compare
from bespoke.report.detection import relative_false_accepts
from bespoke.report.runs import find_runs
from bespoke.report.summary import Evaluations, summarise
from bespoke.report.table import Comparison

__all__ = [
    "Columns",
    "Comparison",
    "Evaluations",
    "client_chart",
    "client_table",
    "compare",
    "curve_table",
    "curves",
    "find_runs",
    "relative_false_accepts",
    "summarise",
]
