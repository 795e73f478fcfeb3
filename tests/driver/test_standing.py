"""The table of the full tier, which a run writes."""
from tests.driver import standing
from tests.driver.outcome import Outcome


def test_a_page_has_the_table_of_the_last_run(tmp_path, monkeypatch):
    monkeypatch.setattr(standing, 'FILE', tmp_path / 'full.json')
    monkeypatch.setattr(standing, 'PAGE', tmp_path / 'full.md')
    outcome = Outcome('build_x')
    outcome.passed, outcome.seconds = 7, 1.6
    standing.write([outcome])
    table = standing.table()
    assert table.endswith('| build_x | 7 | 0 | 0 | 0 | 2 | 0 |\n')
    assert standing.main(['--check']) == 0
    standing.PAGE.write_text(table.replace('| 7 |', '| 8 |'))
    assert standing.main(['--check']) == 1
