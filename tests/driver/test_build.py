"""Build folders: what a killed run has left of one is made anew."""
from tests.driver.build import Build


def folder_of(tmp_path, monkeypatch, *files):
    build = Build('build')
    build.folder = tmp_path / 'build'
    build.folder.mkdir()
    for name in files:
        (build.folder / name).write_text('')
    commands = []

    def run(*command):
        commands.append(command[1])
        build.folder.mkdir(exist_ok=True)
    monkeypatch.setattr(build, 'run', run)
    build.set_up()
    return build.folder, commands


def test_a_folder_that_was_never_finished(tmp_path, monkeypatch):
    folder, commands = folder_of(tmp_path, monkeypatch, 'half')
    assert commands[0] == 'setup' and not (folder / 'half').exists()


def test_a_folder_with_other_options(tmp_path, monkeypatch):
    folder, commands = folder_of(tmp_path, monkeypatch, 'build.ninja', 'object')
    assert commands[0] == 'configure' and (folder / 'object').exists()
