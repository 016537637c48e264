"""What the server sees of each method: the document's table is the code's."""

from pathlib import Path

from bespoke.algorithms import ALGORITHMS
from bespoke.flower import sight

ROOT = Path(__file__).parents[2]


def test_the_document_s_table_is_made_from_the_code():
    text = (ROOT / "docs" / "deployment.md").read_text()
    written = text.partition("<!-- table -->\n")[2].partition("<!-- end of table -->")[0]
    assert written == sight.table(Path(sight.__file__).parent / "federation.toml")
    assert written.count("\n") == 2 + len(ALGORITHMS)
