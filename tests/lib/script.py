"""Programs of scripts/ as modules, for tests of what they are made of."""
import importlib.machinery, importlib.util, os, sys


def load(name):
    path = os.path.join(os.path.dirname(os.path.realpath(__file__)), '..', '..', 'scripts', name)
    loader = importlib.machinery.SourceFileLoader(name, path)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    sys.dont_write_bytecode = True  # it would lie beside the program
    loader.exec_module(module)
    return module
