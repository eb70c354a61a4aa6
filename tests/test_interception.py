"""An intercepted object behaves otherwise for a while, and neither it nor its copies show a trace of that."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from memsave_lib.interception import intercept, is_intercepted, original_class, release


class Plain:
    """A documented class."""

    def __init__(self, value=1):
        self.value = value

    def __call__(self, x):
        return x + self.value

    def who(self):
        return "plain"


class WithArguments(Plain):
    def __new__(cls, value):
        return super().__new__(cls)

    def __getnewargs__(self):
        return (self.value,)


class WithReduce(Plain):
    def __reduce__(self):
        return type(self), (self.value,)


class WithState(Plain):
    def __getstate__(self):
        return {"stored": self.value}

    def __setstate__(self, state):
        self.value = state["stored"]


@dataclass
class Data:
    value: int = 1

    def __call__(self, x):
        return x + self.value

    def who(self):
        return "plain"


class Loud(nn.Linear):
    def who(self):
        return "plain"


def doubled(self, x):
    return 2 * original_class(self).__call__(self, x)


MEMBERS = {"__call__": doubled, "who": lambda self: "intercepted"}
KINDS = [Plain, WithArguments, WithReduce, WithState, Data]

every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


@every_kind
def test_members_change_for_this_object_only(kind):
    one, other = kind(3), kind(4)
    intercept(one, MEMBERS)
    assert (one(10), one.who(), other(10), other.who()) == (26, "intercepted", 14, "plain")
    assert is_intercepted(one) and not is_intercepted(other) and original_class(one) is kind
    release(one)
    assert (one(10), one.who(), type(one)) == (13, "plain", kind)
    assert not is_intercepted(one)


@every_kind
def test_identity_stays(kind):
    one = kind(3)
    attributes = dict(vars(one))
    intercept(one, MEMBERS)
    assert isinstance(one, kind)
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(type(one), name) == getattr(kind, name)
    assert vars(one) == attributes
    one.value = 5
    release(one)
    assert one.value == 5


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@every_kind
def test_copies_are_of_the_original_class(kind, protocol):
    one = kind(3)
    intercept(one, MEMBERS)
    copies = [copy.copy(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one, protocol))]
    for twin in copies:
        assert type(twin) is kind and twin is not one
        assert (twin.value, twin(10), twin.who()) == (3, 13, "plain")
    assert one.who() == "intercepted"


def test_a_module_and_a_whole_tree_are_copied_as_they_were():
    inner = Loud(3, 3)
    tree = nn.Sequential(inner, nn.Sequential(inner, nn.Linear(3, 3)))
    for module in (tree, inner, tree[1]):
        intercept(module, {"who": lambda self: "intercepted"})
    for twin in (copy.deepcopy(tree), pickle.loads(pickle.dumps(tree))):
        assert [type(m) for m in twin.modules()] == [nn.Sequential, Loud, nn.Sequential, nn.Linear]
        assert twin[0] is twin[1][0] and twin[0] is not inner
        assert twin[0].who() == "plain" and torch.equal(twin[0].weight, inner.weight)
    shallow = copy.copy(inner)
    assert type(shallow) is Loud and shallow.weight is inner.weight


def test_one_object_may_be_intercepted_inside_another():
    """Two layers come off in the reverse order; each sees the class below it."""
    one = Plain(3)
    intercept(one, {"who": lambda self: "first"})
    intercept(one, {"who": lambda self: "second"})
    assert one.who() == "second" and type(copy.copy(one)).__mro__[0].__name__ == "Plain"
    release(one)
    assert one.who() == "first"
    release(one)
    assert one.who() == "plain" and type(one) is Plain


def test_a_released_class_lets_go_of_its_members():
    """pytorch#84413: a class lives until the garbage collector runs, and would hold a model till then."""

    class Owner:
        def act(self, instance):
            return "owned"

    owner, one = Owner(), Plain()
    intercept(one, {"who": lambda self, owner=owner: owner.act(self)})
    assert one.who() == "owned"
    alive = weakref.ref(owner)
    gc.disable()
    try:
        release(one)
        del owner
        assert alive() is None
    finally:
        gc.enable()


class Later:
    """What FSDP2's fully_shard puts on top of an object's class."""

    def who(self):
        return f"later, {super().who()}"


def put_on_top(one):
    one.__class__ = type(f"Later{type(one).__name__}", (Later, type(one)), {})


@every_kind
def test_another_class_on_top_stays_there(kind):
    one = kind(3)
    intercept(one, MEMBERS)
    put_on_top(one)
    assert (one(10), one.who()) == (26, "later, intercepted")
    assert is_intercepted(one) and original_class(one) is kind
    on_top = type(one)
    release(one)
    assert (one(10), one.who(), type(one)) == (13, "later, plain", on_top)
    assert not is_intercepted(one) and original_class(one) is on_top


def test_an_object_with_another_class_on_top_can_be_intercepted_again():
    one = Plain(3)
    intercept(one, MEMBERS)
    put_on_top(one)
    release(one)
    on_top = type(one)
    intercept(one, MEMBERS)
    assert (one(10), one.who(), original_class(one)) == (26, "intercepted", on_top)
    release(one)
    assert (one(10), one.who(), type(one)) == (13, "later, plain", on_top)


def test_a_class_below_holds_nothing_alive_when_it_is_released():
    one, held = Plain(3), Plain()
    gone = weakref.ref(held)
    intercept(one, {"who": lambda self, held=held: "intercepted"})
    put_on_top(one)
    del held
    release(one)
    assert gone() is None
