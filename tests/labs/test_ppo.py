import copy

from stepwell.labs import ppo


def test_the_claim_holds_and_the_check_can_fail():
    numbers = ppo.measure(small=True)
    assert ppo.check(numbers) == []
    ledger = numbers["ledger"]
    names = ["policy", "critic", "reference", "reward proxy"]
    assert list(ledger[ppo.SEPARATE]) == list(ledger[ppo.ADAPTERS]) == names
    assert "critic" not in ledger[ppo.SHARED]
    host = ledger[ppo.HOST]["reference"]["measured"]
    assert host == {"device": 0, "host": ledger[ppo.SEPARATE]["reference"]["measured"]["device"]}
    assert ledger[ppo.ADAPTERS]["reference"]["measured"] == {"device": 0, "host": 0}
    assert len(ppo.plot(numbers).axes) == 4
    for change, said in (
        (lambda n: held(n, ppo.SEPARATE, 1), "the critic holds"),
        (lambda n: held(n, ppo.ADAPTERS, 900), "adapters, reference without them: the critic"),
        (lambda n: held(n, ppo.HOST, 100_000), "bytes a parameter, not 34"),
        (lambda n: n.update(parameters=numbers["parameters"] // 2), "bytes a parameter"),
        (lambda n: set_(n, ppo.NONE, "gold", 9.0), "no leash, seed 0: gold from"),
        (lambda n: set_(n, ppo.FIXED, "kl", 99.0), "fixed leash, seed 0: kl 99.00"),
        (lambda n: set_(n, ppo.FIXED, "proxy", 99.0), "fixed leash, seed 0: proxy 99.00"),
        (lambda n: set_(n, ppo.ADAPTIVE, "gold", -99.0), "adaptive leash, seed 0: gold -99.00"),
        (lambda n: set_(n, ppo.ADAPTIVE, "kl", 4.1), "4.10 nats, the target is 3"),
        (lambda n: set_(n, ppo.ADAPTIVE, "kl", 1.9), "1.90 nats, the target is 3"),
    ):
        off = copy.deepcopy(numbers)
        change(off)
        assert said in "\n".join(ppo.check(off))


def held(numbers, placement, more):
    numbers["ledger"][placement]["critic"]["measured"]["device"] += more


def set_(numbers, leash, name, value):
    numbers["leash"][leash][name]["by_seed"] = [value]
