"""Find which functions read each configuration key, by static analysis with minimal type inference.

A read is attributed to the function that contains it. If a method or property of a config class reads keys (such as
`AlgorithmConfig.bounds`), the reads are attributed to its callers. If the type of the expression before the dot cannot
be inferred, the read counts for every config class that has a key of that name.
"""

from __future__ import annotations

import ast
import functools
import importlib
import types
import typing
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dora_rl
from dora_rl.core.config import Config

PACKAGE = Path(dora_rl.__file__).parent
ROOTS = {
    "RunConfig": "dora_rl.runtime.config",
    "SimConfig": "dora_rl.sim.config",
    "SftConfig": "dora_rl.trainer.sft",
    "SandboxLimits": "dora_rl.envs.sandbox.sandbox",
}
"""The configurations that users write; all other config classes are nested in these."""

Key = tuple[str, str]
"""The name of a config class and the name of one of its fields."""
_UNKNOWN = "?"
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def root(name: str) -> type[Config]:
    """Return one of the classes in `ROOTS`."""
    found: type[Config] = getattr(importlib.import_module(ROOTS[name]), name)
    return found


def section(annotation: Any) -> type[Config] | None:
    """Return the config class that a field holds, including an optional one."""
    for kind in (annotation, *typing.get_args(annotation)):
        if isinstance(kind, type) and not isinstance(kind, types.GenericAlias) and issubclass(kind, Config):
            return kind
    return None


def keys(kind: type[Config], path: str = "", seen: set[type[Config]] | None = None) -> Iterator[tuple[str, Key]]:
    """Yield the dotted path of every key in a config file, with its class and field.

    A class that occurs in several places (`data` and `evaluation.data`) is traversed only in the first.
    """
    seen = set() if seen is None else seen
    seen.add(kind)
    for name, field in kind.model_fields.items():
        yield path + name, (kind.__name__, name)
        inner = section(field.annotation)
        if inner is not None and inner not in seen:
            yield from keys(inner, f"{path}{name}.", seen)


@functools.cache
def readers() -> dict[Key, frozenset[str]]:
    """Return the functions that read each key, as `module:Class.function` relative to `dora_rl`."""
    return _source().readers(guess=True)


@functools.cache
def certain_readers() -> dict[Key, frozenset[str]]:
    """Return the same without reads from expressions of unknown type."""
    return _source().readers(guess=False)


@functools.cache
def _source() -> _Source:
    return _Source()


class _Source:
    def __init__(self) -> None:
        self._configs: dict[str, type[Config]] = {}
        for name in ROOTS:
            self._collect(root(name))
        self._attributes: dict[str, dict[str, str]] = defaultdict(dict)
        """For each class, the name of each attribute's class."""
        self._returns: dict[str, str] = {}
        """The return types of functions and methods, by unqualified name."""
        self._functions: list[tuple[str, str | None, _Function]] = []
        for path in sorted(PACKAGE.rglob("*.py")):
            module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
            self._list(module, None, ast.parse(path.read_text()).body)
        for _ in range(3):  # the type of an attribute may depend on the attributes of another class
            for _, owner, function in self._functions:
                _Walk(self._configs, self._attributes, self._returns, owner, function)

    def readers(self, *, guess: bool) -> dict[Key, frozenset[str]]:
        found: dict[Key, set[str]] = defaultdict(set)
        methods: dict[Key, set[Key]] = defaultdict(set)
        outside: list[tuple[str, set[Key]]] = []
        for module, owner, function in self._functions:
            walk = _Walk(self._configs, self._attributes, self._returns, owner, function)
            reads = walk.reads | walk.guesses if guess else walk.reads
            if owner in self._configs:
                if not function.name.startswith("_"):  # validators do not give a key an effect
                    methods[owner, function.name] |= reads
            else:
                outside.append((f"{module}:{owner + '.' if owner else ''}{function.name}", reads))
        for name, reads in outside:
            waiting, done = list(reads), set()
            while waiting:
                key = waiting.pop()
                if key not in done:
                    done.add(key)
                    waiting.extend(methods.get(key, ()))
            for key in done:
                found[key].add(name)
        return {key: frozenset(names) for key, names in found.items()}

    def _collect(self, kind: type[Config]) -> None:
        if kind.__name__ not in self._configs:
            self._configs[kind.__name__] = kind
            for field in kind.model_fields.values():
                inner = section(field.annotation)
                if inner is not None:
                    self._collect(inner)

    def _list(self, module: str, owner: str | None, body: list[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                self._attributes[node.name].setdefault("", node.name)
                for one in node.body:
                    if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
                        self._attributes[node.name][one.target.id] = _named(one.annotation)
                self._list(module, node.name, node.body)
            elif isinstance(node, _Function):
                self._functions.append((module, owner, node))
                returned = _named(node.returns)
                known = self._returns.setdefault(node.name, returned)
                if known != returned:
                    self._returns[node.name] = _UNKNOWN


class _Walk(ast.NodeVisitor):
    """Collect the keys that one function reads, and infer attribute types of its class."""

    def __init__(
        self,
        configs: dict[str, type[Config]],
        attributes: dict[str, dict[str, str]],
        returns: dict[str, str],
        owner: str | None,
        function: _Function,
    ) -> None:
        self._configs = configs
        self._attributes = attributes
        self._returns = returns
        self._names = {"self": owner or _UNKNOWN}
        self.reads: set[Key] = set()
        self.guesses: set[Key] = set()
        """Reads from expressions of unknown type."""
        arguments = function.args
        for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            if one.annotation is not None:
                self._names[one.arg] = _named(one.annotation)
        for statement in function.body:
            self.visit(statement)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=False))
            for to, value in pairs:
                self._learn(to, self._kind(value))
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._learn(node.target, _named(node.annotation))
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Load):
            kind = self._kind(node.value)
            if kind in self._configs:
                self.reads.add((kind, node.attr))
            elif kind == _UNKNOWN:
                known = self._configs.items()
                self.guesses |= {(name, node.attr) for name, one in known if node.attr in one.model_fields}
        self.generic_visit(node)

    def _learn(self, target: ast.expr, kind: str) -> None:
        if isinstance(target, ast.Name):
            self._names[target.id] = kind
        elif isinstance(target, ast.Attribute) and self._kind(target.value) == self._names["self"] and kind != _UNKNOWN:
            self._attributes[self._names["self"]][target.attr] = kind

    def _kind(self, node: ast.expr) -> str:
        """Return the unqualified name of an expression's class."""
        match node:
            case ast.Name(id=name):
                return self._names.get(name, _UNKNOWN)
            case ast.Attribute(value=value, attr=name):
                owner = self._kind(value)
                if owner in self._configs and name in self._configs[owner].model_fields:
                    inner = section(self._configs[owner].model_fields[name].annotation)
                    return "leaf" if inner is None else inner.__name__
                return self._attributes.get(owner, {}).get(name, _UNKNOWN)
            case ast.Call(func=ast.Attribute(value=value, attr="model_copy")):
                return self._kind(value)
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
                return name if name in self._attributes else self._returns.get(name, _UNKNOWN)
            case ast.BoolOp(values=[first, *_]):
                return self._kind(first)
            case _:
                return _UNKNOWN


def _named(annotation: ast.expr | None) -> str:
    """Return the first class named in an annotation, ignoring `None`."""
    match annotation:
        case ast.Name(id=name):
            return name
        case ast.Attribute(attr=name):
            return name
        case ast.BinOp(left=left, right=right):
            first = _named(left)
            return _named(right) if first == _UNKNOWN else first
        case ast.Constant(value=str(text)):
            return _named(ast.parse(text, mode="eval").body)
        case _:
            return _UNKNOWN
