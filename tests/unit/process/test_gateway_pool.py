"""Which gateway of a pool is next: by weight, evenly, and with `sticky` always the same one for a host."""

from collections import Counter

from conveyor.model import Gateway, PooledGateway, Sticky
from conveyor.process.gateway_pool import GatewayPool, make_pool


def pool_of(*weights: int, sticky: bool = False, seed: int = 0) -> GatewayPool:
    members = [PooledGateway(proxy=f"http://gate{at}.example:3128", weight=each) for at, each in enumerate(weights)]
    return GatewayPool(Gateway(pool=members, sticky=Sticky.HOST if sticky else None), seed)


def test_weights_are_kept_and_nobody_waits_for_a_whole_round() -> None:
    pool = pool_of(60, 30, 10)
    taken = [pool.take(pool.members) for _ in range(100)]
    assert Counter(taken) == {0: 60, 1: 30, 2: 10}
    assert all(Counter(taken[at : at + 10])[0] in (5, 6, 7) for at in range(0, 100, 10)), "spread over the round"


def test_what_is_down_is_left_out_and_the_others_keep_their_weights() -> None:
    pool = pool_of(60, 30, 10)
    assert Counter(pool.take((1, 2)) for _ in range(40)) == {1: 30, 2: 10}
    assert {pool.take((2,)) for _ in range(5)} == {2}


def test_jobs_of_one_task_do_not_all_begin_with_the_first_gateway() -> None:
    firsts = Counter(pool_of(1, 1, seed=seed).take((0, 1)) for seed in range(100))
    assert firsts == {0: 50, 1: 50}


def test_a_host_stays_with_its_gateway_and_only_those_of_one_that_is_down_move() -> None:
    pool, elsewhere = pool_of(3, 1, 1, sticky=True), pool_of(3, 1, 1, sticky=True, seed=7)
    hosts = [f"host{number}.example" for number in range(3000)]
    before = {host: pool.of_host(host, pool.members) for host in hosts}
    assert before == {host: elsewhere.of_host(host, pool.members) for host in hosts}, "the same at all workers"
    shares = Counter(before.values())
    assert 1650 < shares[0] < 1950, shares
    after = {host: pool.of_host(host, (0, 2)) for host in hosts}
    assert {before[host] for host in hosts if before[host] != after[host]} == {1}


def test_names_have_no_secrets_and_tell_gateways_at_one_origin_apart() -> None:
    proxies = ("http://one:secret@gate.example:3128", "http://two:secret@gate.example:3128", "http://other.example:1")
    pool = make_pool(Gateway(pool=[PooledGateway(proxy=proxy) for proxy in proxies]))
    assert pool is not None
    assert pool.names == (
        "gateway:http://gate.example:3128",
        "gateway:http://gate.example:3128#2",
        "gateway:http://other.example:1",
    )
    assert make_pool(None) is None
    assert make_pool(Gateway()) is None
