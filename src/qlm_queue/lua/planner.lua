-- unplaced, arrived, place, reclaim, shed, forget_instance, waiting, overview: the calls of planners, without apply_plan (plan.lua).

-- args: after ('' from the start), page size; answer: the id to go on after ('' at the end), live records
-- Both the pending entries and those never read may hold requests that were placed unread, so a page may give few records or none.
local function unplaced(keys, args)
  local prefix = keys[1]
  local _, at = read_bounds(args)
  local after, wanted = args[at], tonumber(args[at + 1])
  local stream = prefix .. ':queue'
  local answer = { '' }
  local function add(id)
    local record, body = read_by_id(prefix, id)
    if record and record.state == 'A' then answer[#answer + 1] = live_answer(record, body) end
    answer[1] = id
  end
  local start = after == '' and '-' or '(' .. after
  local pending = redis.call('XPENDING', stream, CONSUMER_GROUP, start, '+', wanted)
  for _, entry in ipairs(pending) do add(entry[1]) end
  if #pending > 0 then return answer end
  local delivered = last_delivered(stream)
  if after ~= '' and is_after(after, delivered) then delivered = after end
  for _, entry in ipairs(redis.call('XRANGE', stream, '(' .. delivered, '+', 'COUNT', wanted)) do add(entry[1]) end
  return answer
end

-- args: (queue id, hash key)… of entries that were just read; answer: live records of those to place, without their bodies: the reader has
-- them. The others were placed unread and are pending no more.
local function arrived(keys, args)
  local prefix = keys[1]
  local _, at = read_bounds(args)
  local found = {}
  for index = at, #args, 2 do
    local record = read_request(args[index + 1])
    if record and record.id == args[index] and record.state == 'A' then
      found[#found + 1] = live_answer(record, '')
    else
      redis.call('XACK', prefix .. ':queue', CONSUMER_GROUP, args[index])
    end
  end
  return found
end

-- A group of a call, whose arguments begin at `at`.
local function group_at(args, at)
  return {
    gid = args[at], instance = args[at + 1], before = args[at + 2], deadline = args[at + 3], last_deadline = args[at + 4],
    slo_least = args[at + 5], first = at + 7, strings = tonumber(args[at + 6]),
  }
end

-- Makes a group ready for the first request that a call places in it: open, with the deadlines and the least SLO of the call.
local function place_first(batch, args, group)
  local prefix = batch.prefix
  local _, meta = group_keys(prefix, group.gid)
  local stored = redis.call('HMGET', meta, 'first_deadline', 'slo_least', 'last_deadline')
  group.is_open = true
  if not stored[2] or tonumber(group.slo_least) < tonumber(stored[2]) then
    redis.call('HSET', meta, 'slo_least', group.slo_least)
  end
  if not stored[3] or tonumber(group.last_deadline) > tonumber(stored[3]) then
    redis.call('HSET', meta, 'last_deadline', group.last_deadline)
  end
  if (place_of(prefix, group.gid) or '') == '' then
    redis.call('HSET', meta, 'first_deadline', group.deadline, unpack(args, group.first, group.first + group.strings - 1))
    local instance = serves(prefix, group.instance) and group.instance or UNASSIGNED
    open_group(batch, group.gid, instance, group.before == '' and 'end' or group.before)
  elseif tonumber(group.deadline) < tonumber(stored[1]) then
    redis.call('HSET', meta, 'first_deadline', group.deadline)
  end
end

-- args: lease token, number of groups, groups (gid, instance, before, first deadline, last deadline, least SLO, number of
--       meta strings, meta field and value…)…, requests (queue id, hash key, index of its group)…; answer: a status a request
local function place(keys, args)
  local prefix = keys[1]
  local bounds, at = read_bounds(args)
  if not lease_holds(prefix, 'planner', args[at]) then return LEASE_LOST end
  local batch = open_batch(prefix, bounds)
  local groups = {}
  local group_count = tonumber(args[at + 1])
  at = at + 2
  for index = 1, group_count do
    groups[index] = group_at(args, at)
    at = groups[index].first + groups[index].strings
  end
  local statuses, now = {}, now_ms()
  while at <= #args do
    local id, hash_key, group = args[at], args[at + 1], groups[tonumber(args[at + 2])]
    at = at + 3
    local record = read_request(hash_key)
    if not record or record.id ~= id or (record.state ~= 'A' and not (record.state == 'P' and record.group == group.gid)) then
      statuses[#statuses + 1] = 'stale'
    else
      statuses[#statuses + 1] = 'done'
      if record.state == 'A' then
        record.state, record.group = 'P', group.gid
        if not group.is_open then place_first(batch, args, group) end
        join_group(batch, group.gid, record)
        local changes = changes_of(batch, group.gid)
        changes.live = changes.live + 1
        redis.call('HSET', hash_key, 's', state_text(record), 'g', group.gid, 'p', integer(now - record.accepted_ms))
        batch.settled[#batch.settled + 1] = id
        count(batch, 'unplaced', -1)
      end
    end
  end
  close_batch(batch)
  return statuses
end

-- args: lease token, incarnation, failure; answer: requests taken
local function reclaim(keys, args)
  local prefix = keys[1]
  local bounds, at = read_bounds(args)
  if not lease_holds(prefix, 'planner', args[at]) then return LEASE_LOST end
  local incarnation, failure = args[at + 1], args[at + 2]
  if redis.call('EXISTS', prefix .. ':lease:' .. incarnation) == 1 then return 0 end
  local ids = redis.call('SMEMBERS', prefix .. ':running:' .. incarnation)
  if #ids == 0 then
    redis.call('SREM', prefix .. ':incarnations', incarnation)
    return 0
  end
  local order = {}
  for _, id in ipairs(ids) do
    local ms, seq = string.match(id, '^(%d+)-(%d+)$')
    order[id] = { tonumber(ms), tonumber(seq) }
  end
  table.sort(ids, function(left, right)
    local l, r = order[left], order[right]
    if l[1] ~= r[1] then return l[1] > r[1] end
    return l[2] > r[2]
  end)
  local batch = open_batch(prefix, bounds)
  local taken = math.min(#ids, BATCH_MAX)
  for index = 1, taken do
    local record, body = read_by_id(prefix, ids[index])
    if record.attempt >= bounds.pulls_max then
      finish(batch, record, 'F', failure, body, nil, '', '', false)
    else
      return_to_group(batch, record, 'head', false)
      add_event(batch, 'requeued', record, 'lost', first_output(record))
    end
  end
  close_batch(batch)
  return taken
end

-- args: lease token, gid, keep, count, 'old' or 'new' end first, failure; answer: requests ended
local function shed(keys, args)
  local prefix = keys[1]
  local bounds, at = read_bounds(args)
  if not lease_holds(prefix, 'planner', args[at]) then return LEASE_LOST end
  local members = group_keys(prefix, args[at + 1])
  local most = math.min(tonumber(args[at + 3]), redis.call('ZCARD', members) - tonumber(args[at + 2]), BATCH_MAX)
  if most < 1 then return 0 end
  local ids = redis.call(args[at + 4] == 'old' and 'ZRANGE' or 'ZREVRANGE', members, 0, most - 1)
  local batch = open_batch(prefix, bounds)
  for _, id in ipairs(ids) do
    local record, body = read_by_id(prefix, id)
    finish(batch, record, 'F', args[at + 5], body, nil, '', '', false)
  end
  close_batch(batch)
  return #ids
end

-- args: lease token, instance; answer: 1 if it was removed
local function forget_instance(keys, args)
  local prefix = keys[1]
  local _, at = read_bounds(args)
  if not lease_holds(prefix, 'planner', args[at]) then return LEASE_LOST end
  local instance = args[at + 1]
  local incarnation = redis.call('HGET', prefix .. ':registered', instance)
  if not incarnation then return 0 end
  if redis.call('EXISTS', prefix .. ':lease:' .. incarnation, prefix .. ':vq:' .. instance, prefix .. ':running:' .. incarnation) > 0 then
    return 0
  end
  redis.call('HDEL', prefix .. ':registered', instance)
  redis.call('HDEL', prefix .. ':instances', instance)
  redis.call('SREM', prefix .. ':incarnations', incarnation)
  redis.call('HDEL', prefix .. ':vq_version', instance)
  redis.call('DEL', prefix .. ':ctl:' .. instance)
  return 1
end

-- args: gid, after (acceptance number), count; answer: live records
local function waiting(keys, args)
  local prefix = keys[1]
  local _, at = read_bounds(args)
  local found = {}
  local ids = redis.call('ZRANGEBYSCORE', prefix .. ':group:' .. args[at], '(' .. args[at + 1], '+inf', 'LIMIT', 0, args[at + 2])
  for _, id in ipairs(ids) do
    local record, body = read_by_id(prefix, id)
    found[#found + 1] = live_answer(record, body)
  end
  return found
end

-- A group as others read it: id, where it is as stored, waiting, the queue id of its first waiting request (none: ''), its record.
local function group_answer(prefix, gid, stored)
  local members, meta = group_keys(prefix, gid)
  local first = redis.call('ZRANGE', members, 0, 0)[1] or ''
  return { gid, stored, redis.call('ZCARD', members), first, redis.call('HGETALL', meta) }
end

-- args: 'all' groups or 'some', their ids; answer: plan version, accepted, live, unplaced, virtual queues, groups, instances, incarnations, last event id, findings mended, pauses
local function overview(keys, args)
  local prefix = keys[1]
  local _, at = read_bounds(args)
  local counts = redis.call('HMGET', prefix .. ':counts', 'live', 'unplaced')
  local registered = {}
  local instances = {}
  local pairs_of_registered = redis.call('HGETALL', prefix .. ':registered')
  for index = 1, #pairs_of_registered, 2 do
    local name, incarnation = pairs_of_registered[index], pairs_of_registered[index + 1]
    registered[name] = incarnation
    instances[#instances + 1] = {
      name, incarnation, redis.call('EXISTS', prefix .. ':lease:' .. incarnation), redis.call('HGET', prefix .. ':instances', name),
    }
  end
  local queues = {}
  local versions = redis.call('HGETALL', prefix .. ':vq_version')
  local has_unassigned = false
  for index = 1, #versions, 2 do
    local name = versions[index]
    if name == UNASSIGNED then has_unassigned = true end
    local running = registered[name] and redis.call('SCARD', prefix .. ':running:' .. registered[name]) or 0
    queues[#queues + 1] = { name, versions[index + 1], running, redis.call('LRANGE', prefix .. ':vq:' .. name, 0, -1) }
  end
  if not has_unassigned then queues[#queues + 1] = { UNASSIGNED, '0', 0, {} } end
  local groups = {}
  if args[at] == 'all' then
    local stored = redis.call('HGETALL', prefix .. ':groups')
    for index = 1, #stored, 2 do groups[#groups + 1] = group_answer(prefix, stored[index], stored[index + 1]) end
  elseif #args > at then
    for index, stored in ipairs(redis.call('HMGET', prefix .. ':groups', unpack(args, at + 1))) do
      if stored then groups[#groups + 1] = group_answer(prefix, args[at + index], stored) end
    end
  end
  local incarnations = {}
  for _, incarnation in ipairs(redis.call('SMEMBERS', prefix .. ':incarnations')) do
    incarnations[#incarnations + 1] = { incarnation, redis.call('EXISTS', prefix .. ':lease:' .. incarnation) }
  end
  local last = redis.call('XREVRANGE', prefix .. ':events', '+', '-', 'COUNT', 1)
  return {
    redis.call('GET', prefix .. ':plan_version') or '0', redis.call('GET', prefix .. ':acceptance') or '0',
    counts[1] or '0', counts[2] or '0', queues, groups, instances, incarnations, #last > 0 and last[1][1] or '0-0',
    redis.call('GET', prefix .. ':damage_count') or '0', redis.call('HGETALL', prefix .. ':paused'),
  }
end
