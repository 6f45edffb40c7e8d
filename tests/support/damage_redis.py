"""Damages keys and fields of a queue on a server, at random: deleted, truncated, of another type, of another key."""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Any

import redis.asyncio as redis


async def damage(client: redis.Redis, prefix: str, chance: random.Random, spared: Collection[str] = ()) -> tuple[str, str]:
    """One key or field, of other kinds than the `spared`. Returns its name and what was done."""
    names = sorted([name async for name in client.scan_iter(match=prefix.replace("{", "\\{") + ":*", count=1000)])
    kinds = sorted({_kind(name, prefix) for name in names} - {*spared})
    kind = chance.choice(kinds)  # few keys are as often hit as many
    same = [name for name in names if _kind(name, prefix) == kind]
    name = chance.choice(same)
    what = chance.choice(("deleted", "another type", "part"))
    if what == "deleted":
        await client.delete(name)
    elif what == "another type":
        is_list = await client.type(name) == b"list"
        async with client.pipeline(transaction=True) as both:  # or the cluster writes between them
            both.delete(name)
            _ = both.set(name, "junk") if is_list else both.rpush(name, "junk")
            await both.execute()
    else:
        what = await _damage_part(client, name, same, chance)
    return name.decode(), what


def _kind(name: bytes, prefix: str) -> str:
    return name.decode()[len(prefix) + 1 :].partition(":")[0]


async def _damage_part(client: Any, name: bytes, same: list[bytes], chance: random.Random) -> str:
    match await client.type(name):
        case b"string":
            value = await client.get(name)
            await client.set(name, value[: chance.randrange(len(value) + 1)], keepttl=True)
            return "truncated"
        case b"hash":
            fields = sorted(await client.hkeys(name))
            field = chance.choice(fields)
            value = await client.hget(name, field)
            source = chance.choice(same)
            other = await client.hget(source, field) if await client.type(source) == b"hash" else b""
            match chance.randrange(3):
                case 0:
                    await client.hdel(name, field)
                    return f"field {field.decode()} deleted"
                case 1:
                    await client.hset(name, field, value[: chance.randrange(len(value) + 1)])
                    return f"field {field.decode()} truncated"
                case _:
                    await client.hset(name, field, other or b"")
                    return f"field {field.decode()} of another"
        case b"list":
            await client.lset(name, chance.randrange(await client.llen(name)), "gone")
            return "item"
        case b"set":
            await client.srem(name, await client.srandmember(name))
            return "member deleted"
        case b"zset":
            member = chance.choice(await client.zrange(name, 0, -1))
            await (client.zrem(name, member) if chance.random() < 0.5 else client.zadd(name, {b"1-0": 0.5}))
            return "member"
        case b"stream":
            entries = await client.xrange(name)
            if entries:
                entry_id = chance.choice(entries)[0]
                await client.xdel(name, entry_id)
                return f"entry {entry_id.decode()}"
    return "gone"
