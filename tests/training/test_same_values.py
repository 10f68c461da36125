"""Two real processes whose values should be the same, and differ; or should differ, and are the same."""

import pathlib

import pytest
from processes import results_of

WORKER = pathlib.Path(__file__).with_name("same_values_worker.py")
EQUAL = "processes 0 and 1 give the same batch"
DIFFER = "ValueError: the processes differ in the train state that they make: "
WANTED = {
    "equal parts of a step": [EQUAL],
    "equal parts of an evaluation": [EQUAL],
    "own parts": [],
    "sizes of one process": [],
    "sizes after those": [],
    "equal sizes": [],
    "ones": [],
    "keys": [],
    "scalars": "ValueError: batch leaf 'scale' has no dim of examples, and processes 0 and 1 give different values",
    "the same part": "ValueError: batch leaf 'x' is of the same examples in both, and processes 0 and 1 give different",
    "params": f"{DIFFER}the values of 'w' is ",
    "few params": f"{DIFFER}the values of 'w' is ",
    "constants": f"{DIFFER}its program, line ",
    "optimizer": f"{DIFFER}its program, line ",
    "another optimizer": f"{DIFFER}the state's leaf 'opt_state/0/count' is int32[] in process 0, missing in process 1",
    "config": "ValueError: the processes differ in the train step: num_microbatches is 1 in process 0, 2 in",
    "config of another program": [],
    "key": f"{DIFFER}the state's key is ",
}


@pytest.mark.slow
def test_values_of_processes_that_should_be_the_same_or_should_differ():
    for index, result in enumerate(results_of(WORKER, [(i,) for i in range(2)])):
        # It is the later process that sees what the other one has placed.
        of_later = {"equal parts that are sharded": [EQUAL], "own sizes": ["process 1 calls "]}
        for name, wanted in {**WANTED, **{name: texts if index else [] for name, texts in of_later.items()}}.items():
            found = result.pop(name)
            assert type(found) is type(wanted) and len(found) >= len(wanted), (name, found)
            texts = zip(found, wanted, strict=True) if isinstance(wanted, list) else [(found, wanted)]
            assert all(text.startswith(start) for text, start in texts), (name, found)
            assert "in processes 0 and 1" not in found, "what differs, in a line however long, is shown"
        assert not result
