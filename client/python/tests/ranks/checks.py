"""Which checks a script runs: the functions check_* of its module, all or those that are named."""

import sys


def chosen(module, wanted):
    """[(name, function)], in the order in which they are written. Ends the process where there is no check of a wanted name."""
    checks = {name: check for name, check in module.items() if name.startswith("check_")}
    unknown = [name for name in wanted if name not in checks]
    if unknown or not checks:
        sys.exit(f"there is no check {', '.join(unknown)}; there are: {', '.join(checks) or 'none'}")
    return [(name, check) for name, check in checks.items() if name in wanted or not wanted]
