"""The participation check, against a plain dict, and what its state gives away."""

import copy
import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmfact.factorize.errors import ParticipationError, PrivacyError, StateError
from mmfact.factorize.participation import single
from mmfact.noise import NoiseKey, participation
from mmfact.noise.participation import ParticipationCheck

KEY = NoiseKey.insecure_from_seed(5)
RUN = b"0123456789abcdef"


def fresh(key=KEY, run=RUN):
    return ParticipationCheck(single(), key, run)


def restored(state, key=KEY, run=RUN):
    return ParticipationCheck.restore(single(), key, run, state)


# what an id may be, with collisions likely, also across types
IDS = st.one_of(
    st.integers(-5, 40),
    st.integers(-(2**70), 2**70),
    st.integers(0, 40).map(str),
    st.integers(0, 40).map(lambda i: str(i).encode()),
    st.text(max_size=3),
)
MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), st.integers(0, 3), st.lists(IDS, max_size=6)),
        st.tuples(st.just("save"), st.none(), st.none()),
        st.tuples(st.just("restore"), st.integers(0, 9), st.none()),
    ),
    max_size=40,
)


class TestAgainstADict:
    @given(moves=MOVES)
    def test_any_steps_saves_and_restores(self, moves):
        """The model: {(type, id): step} and the next step; a saved pair of model and state for every save."""
        check, seen, following, steps = fresh(), {}, 0, 0
        saved = [(check.state(), {}, 0, 0)]
        for move, number, ids in moves:
            if move == "save":
                saved.append((check.state(), dict(seen), following, steps))
            elif move == "restore":
                state, model, following, steps = saved[number % len(saved)]
                check, seen = restored(state), dict(model)
            else:
                step = following + number - 1
                named = [(type(value), value) for value in ids]
                if step < following:
                    with pytest.raises(StateError):
                        check.admit(step, ids)
                elif len(set(named)) < len(named) or any(name in seen for name in named):
                    with pytest.raises(ParticipationError):
                        check.admit(step, ids)
                else:
                    check.admit(step, ids)
                    seen.update(dict.fromkeys(named, step))
                    following, steps = step + 1, steps + 1
            expected = {"schema": "single", "checked": True, "steps": steps, "examples": len(seen)}
            assert check.result() == {**expected, "most": 1 if seen else 0}
            assert check.step == following

    def test_many_steps_with_one_repeat(self):
        """50 steps of 101 ids: every id is still known at the end, and none that was not given."""
        rng = np.random.default_rng(0)
        ids = rng.permutation(100_000)
        check = fresh()
        for step in range(50):
            check.admit(step, ids[101 * step : 101 * step + 101])
        for known in range(0, 101 * 50, 37):
            with pytest.raises(ParticipationError, match="earlier step"):
                check.admit(50, [int(ids[-1]), int(ids[known])])
        assert check.result()["examples"] == 101 * 50
        check.admit(50, ids[101 * 50 :])
        assert check.result()["examples"] == 100_000


class TestIds:
    @pytest.mark.parametrize(
        "same",
        [
            np.array([3, 4], np.uint8),
            np.array([3, 4], np.int64),
            np.array([3, 4], object),
            (3, 4),
            range(3, 5),
            [np.int32(3), np.uint64(4)],
            iter([3, 4]),
        ],
    )
    def test_one_number_is_one_example_whatever_holds_it(self, same):
        check = fresh()
        check.admit(0, [4])
        with pytest.raises(ParticipationError, match=r"the id \S*4\S* of step 1"):
            check.admit(1, same)

    def test_torch_tensors(self):
        torch = pytest.importorskip("torch")
        check = fresh()
        check.admit(0, torch.tensor([1, 2]))
        with pytest.raises(ParticipationError, match="the id 2 of step 1"):
            check.admit(1, np.array([2, 3]))

    def test_numbers_text_and_bytes_are_told_apart(self):
        check = fresh()
        check.admit(0, [1, "1", b"1", -1, 255, "", b"", 0, "\ud800", 2**64, -(2**64)])
        assert check.result()["examples"] == 11
        for again in (np.array(["1"]), np.array([b"1"])):
            with pytest.raises(ParticipationError):
                check.admit(1, again)

    def test_twice_in_a_step_is_two_contributions(self):
        check = fresh()
        with pytest.raises(ParticipationError, match="the id 'anna' is there twice in step 0"):
            check.admit(0, ["anna", "bert", "anna"])
        check.admit(0, ["anna", "bert"])  # the refused step left nothing behind

    @pytest.mark.parametrize("step", range(3))
    def test_a_refusal_is_of_the_step_as_a_whole(self, step):
        check = fresh()
        check.admit(0, [0, 1, 2])
        with pytest.raises(ParticipationError):
            check.admit(1, [10, step, 11])
        check.admit(1, [10, 11])
        assert check.result() == {"schema": "single", "checked": True, "steps": 2, "examples": 5, "most": 1}

    def test_empty_steps_count(self):
        check = fresh()
        for step, empty in enumerate(([], np.array([], np.int64), ())):
            check.admit(step, empty)
        assert check.result() == {"schema": "single", "checked": True, "steps": 3, "examples": 0, "most": 0}
        assert restored(check.state()).result() == check.result()

    @pytest.mark.parametrize(
        "ids", [[1.0], [True], [None], [[1, 2]], [np.bool_(True)], np.ones(2), np.ones((2, 2), int), [1 << 2000]]
    )
    def test_what_is_no_id(self, ids):
        check = fresh()
        with pytest.raises(ParticipationError, match="id"):
            check.admit(0, ids)
        check.admit(0, [1])

    @pytest.mark.parametrize("ids", ["abc", b"abc", None, 7, np.array(7), {1: 2}])
    def test_what_is_no_list_of_ids(self, ids):
        with pytest.raises(ParticipationError, match=r"ids=\[\]"):
            fresh().admit(0, ids)

    @pytest.mark.parametrize("step", [-1, 0, 4, 1.5, True, None])
    def test_steps_only_go_forward(self, step):
        check = fresh()
        check.admit(4, [1])
        with pytest.raises(StateError, match="step"):
            check.admit(step, [2])
        check.admit(6, [2])
        assert (check.step, check.result()["steps"]) == (7, 2)

    def test_a_refusal_is_a_matter_of_privacy(self):
        assert issubclass(ParticipationError, PrivacyError)


class TestState:
    def filled(self):
        check = fresh()
        for step in range(7):
            check.admit(step, [f"user {8 * step + i}" for i in range(5 + step % 3)])
        return check

    def test_going_on_from_an_earlier_checkpoint_forgets_what_came_after(self):
        check = fresh()
        check.admit(0, [1])
        state = check.state()
        check.admit(1, [2])
        earlier = restored(state)
        earlier.admit(1, [2])
        with pytest.raises(ParticipationError):
            earlier.admit(2, [1])

    def test_saving_changes_nothing(self):
        one, other = self.filled(), self.filled()
        assert one.state() == one.state() == restored(one.state()).state()
        for check in (one, other):
            check.admit(7, [1, 2])
            with pytest.raises(ParticipationError):
                check.admit(8, ["user 0"])
        assert one.state() == other.state()

    def test_without_the_key_it_tells_how_many_and_no_more(self):
        """No id in it; 8 bytes an id; under another key or run the same ids leave no common hash."""
        state = self.filled().state()
        assert b"user" not in state
        hashes = {}
        for name, key, run in (("a", KEY, RUN), ("b", NoiseKey.insecure_from_seed(6), RUN), ("c", KEY, RUN[::-1])):
            check = ParticipationCheck(single(), key, run)
            check.admit(0, range(100))
            body = check.state()[:-64].partition(b"\n")[2]
            assert len(body) == 800
            hashes[name] = {body[i : i + 8] for i in range(0, 800, 8)}
        assert [len(found) for found in hashes.values()] == [100] * 3
        assert not hashes["a"] & hashes["b"]
        assert not hashes["a"] & hashes["c"]

    def test_order_and_company_leave_no_trace(self):
        """The same examples in other steps: the same hashes in the same order."""
        bodies = []
        for order in (range(60), reversed(range(60))):
            ids, check = list(order), fresh()
            for step in range(6):
                check.admit(step, ids[10 * step : 10 * step + 10])
            bodies.append(check.state())
        assert bodies[0] == bodies[1]

    @given(at=st.integers(0, 10_000), bit=st.integers(0, 7))
    def test_any_changed_bit_is_seen(self, at, bit):
        state = bytearray(self.filled().state())
        state[at % len(state)] ^= 1 << bit
        with pytest.raises(StateError, match="changed"):
            restored(bytes(state))

    @given(junk=st.binary(max_size=300), cut=st.integers(0, 400))
    def test_no_bytes_but_its_own(self, junk, cut):
        state = self.filled().state()
        for other in (junk, state + junk[:1] + b"0", state[: min(cut, len(state) - 1)], state[1:]):
            with pytest.raises(StateError, match="changed"):
                restored(other)

    def test_another_key_run_or_version_is_refused(self, monkeypatch):
        state = self.filled().state()
        with pytest.raises(StateError, match="another key"):
            restored(state, key=NoiseKey.insecure_from_seed(6))
        with pytest.raises(StateError, match="of run 3031"):
            restored(state, run=RUN[::-1])
        monkeypatch.setattr(participation, "_VERSION", 2)
        with pytest.raises(StateError, match="of version 1, not 2"):
            restored(state)

    @pytest.mark.parametrize("state", [None, "text", bytearray(100), {"step": 1}])
    def test_what_is_no_state(self, state):
        with pytest.raises(StateError, match="bytes that state"):
            restored(state)

    def test_arguments_of_other_types(self):
        for arguments in (
            ("single", KEY, RUN),
            (single(), b"k" * 32, RUN),
            (single(), KEY, "r" * 16),
            (single(), KEY, b"r"),
        ):
            with pytest.raises(StateError, match="must be"):
                ParticipationCheck(*arguments)

    def test_the_key_leaves_by_no_other_door(self):
        check = self.filled()
        for way in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(StateError, match="secret"):
                way(check)
        assert repr(check) == "ParticipationCheck(single, step=7, examples=41)"


def test_ids_take_eight_bytes_and_few_arrays():
    """200 steps of 100 ids: sorted arrays, each at least twice as long as the next."""
    check = fresh()
    for step in range(200):
        check.admit(step, range(100 * step, 100 * step + 100))
    arrays = check._place[2]
    assert sum(array.nbytes for array in arrays) == 8 * 20_000
    assert all(len(one) >= 2 * len(other) for one, other in itertools.pairwise(arrays))
    assert all((array[1:] > array[:-1]).all() for array in arrays)
