"""Which tests have a name, and which depend on a file of the package; what of C depends on what, the build knows."""
from tests.driver import select
from tests.driver.build import TOP

TESTS = select.PACKAGE / 'tests'


def dependent(*files):
    changed = {TOP / file for file in files}
    return {path.stem for path in TESTS.glob('test_*.py') if select.depends_on(path, changed)}


def test_names_of_tests():
    assert 'an_urgent_message_overtakes' in select.tests_in(TOP / 'tests/unit/transport/test_order.c')
    assert 'comes_and_goes' in select.tests_in(TOP / 'tests/unit/client/test_restart.c')  # of the full tier
    assert 'test_ranks_regroup' in select.tests_in(TOP / 'tests/cluster/test_regroup.py')


def test_a_program_depends_on_what_it_imports():
    found = {path.name for path in select.imports(TOP / 'tests/cluster/test_links.py')}
    assert {'cluster.py', 'links.py', 'recovery.py', 'reference.py'} <= found and 'etcd.py' not in found


def test_files_of_the_package():
    assert dependent('client/python/bps/torch/optimizer.py') == {'test_torch', 'test_torch_process_group'}
    assert dependent('client/python/tests/ranks/numpy_ops.py') == {'test_numpy'}
    assert dependent('client/python/tests/test_names.py') == {'test_names'}
    launch = dependent('client/python/bps/_launch/node.py')
    assert {'test_launch', 'test_launch_ssh'} <= launch and 'test_numpy' not in launch
    assert {'test_numpy', 'test_torch', 'test_launch'} <= dependent('client/python/bps/_ops.py')
    assert not dependent('README.md', 'daemon/main.c')
