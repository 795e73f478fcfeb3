"""What bpslaunch is made of; bps/launch.py is the program.

loop      one selector, timers and signals: everything happens in turns of it
process   children that end with us
output    lines with a prefix, to the terminal and to files
daemon    a private bps-daemon
machine   the part of a run on one machine: its daemon and its ranks
node      a machine as the launcher sees it: in this process, or behind ssh
wire      the messages between launcher and agent
agent     the other end of ssh: a machine that does what the messages say
launcher  the run as a whole
elastic   ranks that come and go
hosts, arguments, placement, bind, topology, byteps, build    what is to be run, and where
"""


class LaunchError(Exception):
    """What cannot be started, in words."""
