"""The page bps_names(7): held to the names of Horovod and BytePS, and to what bps has under them.

names/*.json has what their modules export, with the signatures, as found in their source distributions; names/signatures.txt
what the functions of bps and of its adapters take.
"""

import ast
import importlib
import importlib.util
import inspect
import itertools
import json
import pathlib
import re

import pytest
from conftest import TOP, needs_build

NAMES = pathlib.Path(__file__).parent / "names"
PAGE = TOP / "man" / "bps_names.7.scd"
LISTS = sorted(NAMES.glob("*.json"))
ORIGINALS = {module: names for path in LISTS for module, names in json.loads(path.read_text()).items()}
# What is there to refuse with a way out, and how it is called.
REFUSED = {"start_timeline": ("timeline.json",), "broadcast_global_variables": (0,)}


def read_page():
    """{module: (module of bps, [(name, what the page says of it)])}"""
    tables, rows, cells = {}, None, None
    for line in PAGE.read_text().splitlines():
        heading = re.fullmatch(r"## (\S+), here (\S+)", line)
        if heading:
            assert heading[1] not in tables, f"two tables for {heading[1]}"
            rows, cells = [], None
            tables[heading[1]] = (heading[2], rows)
        elif rows is None or not line or line[1:2] == "[":
            cells = None
        elif line.startswith("|  "):
            cells = [line[3:], ""]
            rows.append(cells)
        elif line.startswith(":  "):
            cells[1] = line[3:]
        elif line.startswith("   "):
            cells[1 if cells[1] else 0] += " " + line.strip()
        else:
            rows = None
    return {
        module: (ours, [(name, here) for names, here in rows for name in names.replace("\\", "").split(", ")])
        for module, (ours, rows) in tables.items()
    }


TABLES = read_page()


def test_every_module_has_a_table():
    assert len(LISTS) == 2 and sorted(TABLES) == sorted(ORIGINALS)
    for module, (ours, _) in TABLES.items():
        assert ours == re.sub("^(horovod|byteps)", "bps", module)


@pytest.mark.parametrize("module", ORIGINALS)
def test_every_name_has_one_row(module):
    _, rows = TABLES[module]
    names = [name for name, _ in rows]
    assert sorted(names) == sorted(ORIGINALS[module])
    for name, here in rows:
        assert re.fullmatch(r"same(: .+)?|not: .+", here), f"{name}: {here}"


def adapter(ours, monkeypatch):
    """The module of bps, or a skip where its framework is not."""
    framework = ours.partition(".")[2].partition(".")[0] or "numpy"
    if framework == "keras" and importlib.util.find_spec("tensorflow") is None:
        monkeypatch.setenv("KERAS_BACKEND", "torch")
    try:
        importlib.import_module(framework)
    except Exception as error:  # MXNet fails in other ways than ImportError with a NumPy that it does not fit
        pytest.skip(f"no {framework} in this Python: {error}")
    try:
        found = importlib.util.find_spec(ours)
    except ModuleNotFoundError:
        found = None
    return None if found is None else importlib.import_module(ours)


def arguments_of(signature):
    """(positional, by name, {name: default that is a literal}) of a signature in a list."""
    arguments = ast.parse(f"def f{signature}: pass").body[0].args
    positional = [a.arg for a in arguments.posonlyargs + arguments.args]
    pairs = list(zip(positional[len(positional) - len(arguments.defaults) :], arguments.defaults))
    pairs += [(a.arg, value) for a, value in zip(arguments.kwonlyargs, arguments.kw_defaults) if value is not None]
    literals = {}
    for name, value in pairs:
        try:
            literals[name] = ast.literal_eval(value)
        except ValueError:
            pass  # Average, Compression.none, ...: values of the original
    return positional, [a.arg for a in arguments.kwonlyargs], literals


def check_arguments(function, original, here):
    """What stands in the way of a call that is written for the original, as a list of words."""
    theirs, by_name, defaults = arguments_of(original)
    if not theirs and not by_name:
        try:
            inspect.signature(function)
        except ValueError:
            return []  # exceptions have none
    ours = inspect.signature(function).parameters
    kinds = inspect.Parameter
    takes_any = any(p.kind == kinds.VAR_KEYWORD for p in ours.values())
    complaints = [f"no argument {name}" for name in theirs + by_name if name not in ours and not takes_any]
    for p in ours.values():
        if p.default is kinds.empty and p.kind not in (kinds.VAR_KEYWORD, kinds.VAR_POSITIONAL):
            if p.name not in theirs + by_name:
                complaints.append(f"requires {p.name}")
    positional = [p.name for p in ours.values() if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    in_order = positional[: len(theirs)] == theirs
    if in_order == ("by name" in here):
        complaints.append(f"the order is {positional}, theirs {theirs}, and the page says: {here}")
    if here == "same":
        for name, default in defaults.items():
            if name in ours and ours[name].default != default:
                complaints.append(f"{name} is {ours[name].default!r}, theirs {default!r}")
    return complaints


def check_same(module, name, original, here):
    if not hasattr(module, name):
        return ["is not there"]
    value = getattr(module, name)
    complaints = []
    if isinstance(original, dict):
        for method, signature in original.items():
            if method and not callable(getattr(value, method, None)):
                complaints.append(f"has no method {method}()")
            elif method and "*args" not in signature:
                try:
                    inspect.signature(getattr(value, method)).bind(*["self", *arguments_of(signature)[0]])
                except TypeError as error:
                    complaints.append(f"{method}{signature}: {error}")
        original = original[""]
    return complaints + (check_arguments(value, original, here) if original else [])


def check_not(module, name):
    """It is not there, or it refuses."""
    from bps import BpsValueError
    from bps._library import Reduction, Unavailable

    value = getattr(module, name, None)
    if value is None:
        return []
    if isinstance(value, Unavailable):
        with pytest.raises(BpsValueError, match=f"op={name}: "):
            Reduction(value)
    elif name in REFUSED:
        with pytest.raises((OSError, RuntimeError), match="bpsctl|broadcast_variables"):
            value(*REFUSED[name])
    else:
        return ["is there"]
    return []


@needs_build
@pytest.mark.parametrize("original", ORIGINALS)
def test_what_the_page_says(original, monkeypatch):
    ours, rows = TABLES[original]
    module = adapter(ours, monkeypatch)
    complaints = []
    for name, here in rows:
        if here.startswith("not: "):
            found = check_not(module, name)
        else:
            found = check_same(module, name, ORIGINALS[original][name], here)
        complaints += [f"{ours}.{name} {complaint}" for complaint in found]
    assert not complaints, "\n".join(complaints)


# -- What the functions of bps and of its adapters take


ADAPTERS = ("bps.torch", "bps.tensorflow", "bps.keras", "bps.jax", "bps.mxnet")


def read_signatures():
    """({function: {module: signature}}, {"other default" or "other order": the names of which this is said})"""
    functions, rows, said = {}, None, {"other default": [], "other order": []}
    for line in (NAMES / "signatures.txt").read_text().splitlines():
        before, _, after = line.partition(": ")
        if before in said:
            said[before] += after.partition(":")[0].split(", ")
        elif line.startswith("    "):
            modules = ADAPTERS if before.strip() == "each adapter" else before.strip().split(", ")
            rows.update(dict.fromkeys(modules, after))
        elif line and not line.startswith("#"):
            rows = functions.setdefault(line, {})
    return functions, said


SIGNATURES, SAID = read_signatures()


class Shown:
    """A default, as a program writes it."""

    def __init__(self, value):
        self.value = value

    def __repr__(self):
        from bps import Reduction
        from bps._compression import NoneCompressor
        from bps._horovod import global_process_set

        if isinstance(self.value, Reduction):
            return self.value.name.capitalize()
        named = {NoneCompressor: "Compression.none", global_process_set: "global_process_set"}
        return next((name for value, name in named.items() if value is self.value), repr(self.value))


def shown(function):
    signature = inspect.signature(function)
    each = signature.parameters.values()
    return str(signature.replace(parameters=[p if p.default is p.empty else p.replace(default=Shown(p.default)) for p in each]))


@needs_build
@pytest.mark.parametrize("ours", ("bps", *ADAPTERS))
def test_signatures(ours, monkeypatch):
    module = adapter(ours, monkeypatch)
    functions = {name: getattr(module, name) for name in module.__all__ if inspect.isfunction(getattr(module, name))}
    assert {name: shown(function) for name, function in functions.items()} == {
        name: rows[ours] for name, rows in SIGNATURES.items() if ours in rows
    }
    assert not [name for name, function in functions.items() if not function.__doc__]


def test_signatures_of_adapters_are_alike():
    other_default, other_order = set(), set()
    for name, rows in SIGNATURES.items():
        # Defaults as text: those that are no literals have names that this module does not know.
        parsed = [ast.parse(f"def f{signature}: pass").body[0].args for signature in dict.fromkeys(rows.values())]
        for one, other in itertools.combinations([dict(pairs_of(arguments)) for arguments in parsed], 2):
            both = [parameter for parameter in one if parameter in other]
            other_default.update(parameter for parameter in both if one[parameter] != other[parameter])
            if both != [parameter for parameter in other if parameter in one]:
                other_order.add(name)
    assert {"other default": sorted(other_default), "other order": sorted(other_order)} == {
        what: sorted(names) for what, names in SAID.items()
    }


def pairs_of(arguments):
    """(name, default as text, or None) of each."""
    positional = arguments.posonlyargs + arguments.args
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults + arguments.kw_defaults
    return [(a.arg, d and ast.unparse(d)) for a, d in zip(positional + arguments.kwonlyargs, defaults)]


def test_a_form_has_the_parameters_of_the_whole():
    from bps import _ops

    def whole(tensor, average=None, name=None, compression="none", op=None):
        pass

    @_ops.form_of(whole, without=["compression"])
    def form(tensors, name="given to nobody", **asked):
        """Of several."""
        return tensors, name, asked

    assert str(inspect.signature(form)) == "(tensors, average=None, name=None, op=None)"
    assert (form.__name__, form.__doc__) == ("form", "Of several.")
    assert form(1, True, "x", op=2) == (1, "x", {"average": True, "op": 2})
    assert form(tensors=1, name=None) == (1, None, {})
    for args, kwargs, text in (
        ((1,), {"compression": 2}, "form() takes tensors, average, name, op, and not compression"),
        ((1, 2, 3, 4, 5), {}, "form() takes tensors, average, name, op, and not 5 arguments"),
        ((1, 2), {"average": 3}, "multiple values for keyword argument 'average'"),
        ((), {"op": 1}, "missing 1 required positional argument: 'tensors'"),
    ):
        with pytest.raises(TypeError, match=re.escape(text)):
            form(*args, **kwargs)
