-- Leases of roles and of agent incarnations.

local function grant(prefix, fence_name, role_of, nonce, ttl_ms)
  local fence = redis.call('INCR', prefix .. ':fence:' .. fence_name)
  local role = role_of(fence)
  local token = integer(fence) .. ':' .. nonce
  redis.call('SET', prefix .. ':lease:' .. role, token, 'PX', ttl_ms)
  return role, token
end

-- args: role, nonce, ttl (ms), address; answer: the token, or '' if another holds it
local function acquire_lease(keys, args)
  local prefix = keys[1]
  local _, at = read_bounds(args)
  local role, nonce, ttl_ms, address = unpack(args, at, at + 3)
  local held = redis.call('GET', prefix .. ':lease:' .. role)
  if held then
    if string.match(held, '^%d+:(.*)$') == nonce then return held end
    return ''
  end
  local _, token = grant(prefix, role, function() return role end, nonce, ttl_ms)
  redis.call('HSET', prefix .. ':address', role, address)
  return token
end

-- args: role, token, ttl (ms)
local function renew_lease(keys, args)
  local prefix = keys[1]
  local _, at = read_bounds(args)
  if not lease_holds(prefix, args[at], args[at + 1]) then return LEASE_LOST end
  redis.call('PEXPIRE', prefix .. ':lease:' .. args[at], args[at + 2])
  return 1
end

-- args: role, token
local function release_lease(keys, args)
  local prefix = keys[1]
  local _, at = read_bounds(args)
  if lease_holds(prefix, args[at], args[at + 1]) then redis.call('DEL', prefix .. ':lease:' .. args[at]) end
  return 1
end

-- Another process serves the instance now. If the one before it lives, it goes on renewing its lease until it hears, at its next pull, that it
-- was replaced; if not, its lease ends as soon as nobody has renewed it for half of its life: its requests need not wait for all of it.
local function shorten_lease(prefix, incarnation, ttl_ms)
  local key = prefix .. ':lease:' .. incarnation
  local left_ms = redis.call('PTTL', key)
  if left_ms >= 0 then redis.call('PEXPIRE', key, math.max(0, left_ms - math.floor(ttl_ms / 2))) end
end

-- args: instance, nonce, body, ttl (ms); answer: incarnation, token
local function register(keys, args)
  local prefix = keys[1]
  local _, at = read_bounds(args)
  local instance, nonce, body, ttl_ms = unpack(args, at, at + 3)
  local known = redis.call('HGET', prefix .. ':registered', instance)
  if known then
    local held = redis.call('GET', prefix .. ':lease:' .. known)
    if held and string.match(held, '^%d+:(.*)$') == nonce then return { known, held } end
    shorten_lease(prefix, known, tonumber(ttl_ms))
  end
  local incarnation, token = grant(prefix, instance, function(fence) return instance .. '/' .. integer(fence) end, nonce, ttl_ms)
  redis.call('HSET', prefix .. ':registered', instance, incarnation)
  redis.call('HSET', prefix .. ':instances', instance, body)
  redis.call('HSETNX', prefix .. ':vq_version', instance, 0)
  redis.call('SADD', prefix .. ':incarnations', incarnation)
  return { incarnation, token }
end

-- args: incarnation, token, body
local function describe(keys, args)
  local prefix = keys[1]
  local _, at = read_bounds(args)
  local incarnation = args[at]
  local instance = instance_of(incarnation)
  if not lease_holds(prefix, incarnation, args[at + 1]) or redis.call('HGET', prefix .. ':registered', instance) ~= incarnation then
    return LEASE_LOST
  end
  redis.call('HSET', prefix .. ':instances', instance, args[at + 2])
  return 1
end

-- args: incarnation, token
local function deregister(keys, args)
  local prefix = keys[1]
  local _, at = read_bounds(args)
  local incarnation = args[at]
  if not lease_holds(prefix, incarnation, args[at + 1]) then return LEASE_LOST end
  redis.call('DEL', prefix .. ':lease:' .. incarnation)
  if redis.call('EXISTS', prefix .. ':running:' .. incarnation) == 0 then
    redis.call('SREM', prefix .. ':incarnations', incarnation)
  end
  return 1
end

-- args: role; answer: address of the live holder or ''
local function leader_address(keys, args)
  local prefix = keys[1]
  local _, at = read_bounds(args)
  if redis.call('EXISTS', prefix .. ':lease:' .. args[at]) == 0 then return '' end
  return redis.call('HGET', prefix .. ':address', args[at]) or ''
end

-- args: role, token, version, body
local function publish_profiles(keys, args)
  local prefix = keys[1]
  local _, at = read_bounds(args)
  if not lease_holds(prefix, args[at], args[at + 1]) then return LEASE_LOST end
  redis.call('HSET', prefix .. ':profiles', 'version', args[at + 2], 'body', args[at + 3])
  return 1
end

-- args: token, body
local function publish_waits(keys, args)
  local prefix = keys[1]
  local _, at = read_bounds(args)
  if not lease_holds(prefix, 'planner', args[at]) then return LEASE_LOST end
  redis.call('SET', prefix .. ':waits', args[at + 1])
  return 1
end

-- answer: the body of `publish_waits`, accepted, live, pauses
local function read_waits(keys, args)
  local prefix = keys[1]
  return {
    redis.call('GET', prefix .. ':waits') or '', redis.call('GET', prefix .. ':acceptance') or '0',
    redis.call('HGET', prefix .. ':counts', 'live') or '0', redis.call('HGETALL', prefix .. ':paused'),
  }
end
