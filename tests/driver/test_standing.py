"""The table of the full tier: what a run writes, and what bps-testing(7) has to have of it."""
from tests.driver import standing
from tests.driver.outcome import Outcome


def test_a_page_has_the_table_of_the_last_run(tmp_path, monkeypatch):
    monkeypatch.setattr(standing, 'FILE', tmp_path / 'full.json')
    monkeypatch.setattr(standing, 'PAGE', tmp_path / 'page.7.scd')
    outcome = Outcome('build_x')
    outcome.passed, outcome.seconds = 7, 1.6
    standing.write([outcome])
    table = standing.table()
    assert table.endswith('\n|[ *group*\n:] *passed*\n:] *failed*\n:] *flaky*\n:] *skipped*\n:] *s*\n:] *CPU-s*\n'
                          '|  build\\_x\n:  7\n:  0\n:  0\n:  0\n:  2\n:  0\n')
    standing.PAGE.write_text(f'# TWO TIERS\n\n{table}\n# MORE\n')
    assert standing.main(['--check']) == 0
    standing.PAGE.write_text(table.replace(':  7', ':  8'))
    assert standing.main(['--check']) == 1
