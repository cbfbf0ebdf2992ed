import os

from gda.testing import pools


def test_few(process_pool, monkeypatch):
    monkeypatch.setattr(pools, "MAX_PROCESSES", 4)
    one, two = process_pool(1), process_pool(2)
    one.run(os.getpid)
    pids = two.run(os.getpid)
    assert one.num_alive == 1
    assert process_pool(2, devices=2) is not two
    assert process_pool(2) is two
    process_pool(2, devices=2).run(os.getpid)
    assert (one.num_alive, two.num_alive) == (0, 2)
    assert two.run(os.getpid) == pids
