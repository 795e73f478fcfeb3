#!/usr/bin/env python3
"""What deploy/ says: units expose little and say why; units, users and folders agree, and so does the image."""
import configparser, json, os, re, shutil, subprocess, sys
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, '..', 'lib'))
from cluster import BUILD, Skip, run

DEPLOY = os.path.abspath(os.path.join(HERE, '..', '..', 'deploy'))
SERVICES = [f'{BUILD}/deploy/bps-daemon.service', f'{DEPLOY}/bps-mps.service']
EXPOSURE = 1.5  # of 10, at most


def read(path):
    with open(path if path.startswith('/') else f'{DEPLOY}/{path}') as file:
        return file.read()


def unit(path):
    """Its sections; of settings that are given several times the last."""
    parser = configparser.RawConfigParser(strict=False, comment_prefixes='#', delimiters='=')
    parser.optionxform = str
    parser.read_string(read(path))
    return parser


def analyze(*arguments):
    if not shutil.which('systemd-analyze'):
        raise Skip('no systemd-analyze here: run scripts/deps full')
    return subprocess.run(['systemd-analyze', *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)


def test_services_expose_little():
    for path in SERVICES:
        out = analyze('security', '--offline=true', f'--threshold={EXPOSURE * 10:.0f}', '--no-pager', path)
        assert out.returncode == 0, out.stdout[-200:] + out.stderr


def test_each_exception_is_explained():
    for path in SERVICES:
        findings = json.loads(analyze('security', '--offline=true', '--no-pager', '--json=short', path).stdout)
        left_out = {finding['name'].split('=')[0] for finding in findings if float(finding['exposure'] or 0) > 0}
        explained = set(re.findall(r'^#   (\w+)= +\S', read(path), re.M))
        assert left_out == explained, f'{path}: not explained: {left_out - explained}; explained, but set: {explained - left_out}'


def test_units_are_understood():
    for path in SERVICES + [f'{DEPLOY}/bps-daemon.socket', f'{DEPLOY}/bps-daemon-admin.socket', f'{DEPLOY}/bps.slice']:
        complaints = [line for line in analyze('verify', '--man=no', path).stderr.splitlines()
                      if re.search(r'bps[\w.-]+:\d+: ', line)]
        assert not complaints, complaints


def test_the_user_and_the_socket_are_the_same_everywhere():
    service, sockets = unit(SERVICES[0]), unit('bps-daemon.socket')
    user, name, _, _, home, _ = re.search(r'^(u) (\S+) (\S+) (".*") (\S+) (\S+)$', read('bps-daemon.sysusers'), re.M).groups()
    assert user == 'u' and service['Service']['User'] == service['Service']['Group'] == name
    assert sockets['Socket']['SocketUser'] == sockets['Socket']['SocketGroup'] == name
    folder = '/run/' + service['Service']['RuntimeDirectory']
    assert os.path.dirname(sockets['Socket']['ListenSequentialPacket']) == folder == home
    mode = int(sockets['Socket']['DirectoryMode'], 8)
    assert read('bps-daemon.tmpfiles').split() == ['d', folder, f'{mode:04o}', name, name, '-']
    assert service['Service']['RuntimeDirectoryMode'] == f'{mode:04o}'
    group = re.search(r'^g (\S+) - -$', read('bps-daemon.sysusers'), re.M)[1]
    admin = unit('bps-daemon-admin.socket')['Socket']
    assert admin['SocketUser'] == name and admin['SocketGroup'] == group and f' {name} {group};' in read('debian/bps-daemon.postrm')
    image = read('container/Containerfile')
    assert re.search(rf'^VOLUME {folder}$', image, re.M) and f' --home-dir {home} ' in image, image
    # The daemon is in the operators' group, under the numbers that volumes and pods name; USER with a group would take it out of it.
    assert 'useradd --uid 9690 --gid 9690 --groups bps-admin ' in image and re.search(r'^USER 9690$', image, re.M), image
    assert f'groupadd --gid 9690 {name} ' in image and f'groupadd --gid 9691 {group} ' in image, image
    assert read('kubernetes-daemonset.yaml').count('        supplementalGroups: [9691]') == 2
    sample = subprocess.run([f'{BUILD}/daemon/bps-daemon', '--print=sample'], capture_output=True, text=True, check=True).stdout
    assert re.search(rf'^#? ?admin_socket = {admin["ListenStream"]}$', sample, re.M), sample
    assert re.search(rf'^#? ?admin_group = {group}$', sample, re.M), sample
    assert re.search(rf'^#? ?socket = {sockets["Socket"]["ListenSequentialPacket"]}$', sample, re.M), sample


run(globals())
