-- pull, unpull, emit, complete, requeue: what agents call.

local function owns(record, id, incarnation, attempt)
  return record and record.i == id and record.s == 'R' and record.o == incarnation and record.a == tonumber(attempt)
end

-- args: incarnation, lease token, model, requests_max, kv tokens, output reserve, Result of expired requests
-- answer: head group, its model, blocked tokens, then (live record, progress)…
local function pull(keys, args)
  local prefix = keys[1]
  local bounds, at = read_bounds(args)
  local incarnation, token, model = args[at], args[at + 1], args[at + 2]
  local requests_max, kv_tokens, reserve = tonumber(args[at + 3]), tonumber(args[at + 4]), tonumber(args[at + 5])
  local instance = instance_of(incarnation)
  if not lease_holds(prefix, incarnation, token) or redis.call('HGET', prefix .. ':registered', instance) ~= incarnation then
    return LEASE_LOST
  end
  local list, running = prefix .. ':vq:' .. instance, prefix .. ':running:' .. incarnation
  local batch = open_batch(prefix, bounds)
  local answer = { '', '', '0' }
  local idle = redis.call('SCARD', running) == 0
  local now, steps = now_ms(), 0
  while model ~= '' and #answer < requests_max + 3 and steps < BATCH_MAX do
    steps = steps + 1
    local gid = redis.call('LINDEX', list, 0)
    if not gid then break end
    local members, meta = group_keys(prefix, gid)
    if redis.call('HGET', meta, 'model') ~= model then break end
    local id = redis.call('ZRANGE', members, 0, 0)[1]
    local record, body = read_by_id(prefix, id)
    if record.x ~= '' and tonumber(record.x) <= now then
      finish(batch, record, 'E', args[at + 6], body, '', '', false)
    else
      local progress = redis.call('GET', prefix .. ':progress:' .. id) or ''
      local need = record.l + math.ceil(#progress / 4) + reserve
      if need > kv_tokens and not (idle and #answer == 3) then
        answer[3] = integer(need)
        break
      end
      kv_tokens = kv_tokens - need
      take_from_group(prefix, record)
      redis.call('SADD', running, id)
      if record.b == '' then record.b = integer(now) end
      redis.call('HSET', record.k, 's', 'R', 'o', incarnation, 'b', record.b)
      count(prefix, 'running', 1)
      record.s, record.o, record.a = 'R', incarnation, redis.call('HINCRBY', record.k, 'a', 1)
      add_event(batch, 'pulled', record)
      answer[#answer + 1] = { live_answer(record, body), progress }
    end
  end
  local head = redis.call('LINDEX', list, 0)
  if head then
    answer[1], answer[2] = head, redis.call('HGET', prefix .. ':group_meta:' .. head, 'model') or ''
  end
  send_batch(batch)
  return answer
end

-- args: ids; answer: (live record, progress)… of those that are live
local function details_with_progress(keys, args)
  local prefix = keys[1]
  local _, at = read_bounds(args)
  local found = {}
  for index = at, #args do
    local record, body = read_by_id(prefix, args[index])
    if record then
      found[#found + 1] = { live_answer(record, body), redis.call('GET', prefix .. ':progress:' .. args[index]) or '' }
    end
  end
  return found
end

-- args: incarnation, cause ('unpulled' or why it is requeued), failure, (queue id, hash key, attempt)…; answer: statuses
local function give_back(keys, args)
  local prefix = keys[1]
  local bounds, at = read_bounds(args)
  local incarnation, cause, failure = args[at], args[at + 1], args[at + 2]
  local batch = open_batch(prefix, bounds)
  local statuses = {}
  for index = at + 3, #args, 3 do
    local id, hash_key = args[index], args[index + 1]
    local record = read_request(hash_key)
    if not owns(record, id, incarnation, args[index + 2]) then
      statuses[#statuses + 1] = 'stale'
    else
      if cause == 'failed' or cause == 'lost' then record.f = redis.call('HINCRBY', hash_key, 'f', 1) end
      if (cause == 'failed' or cause == 'lost') and record.f >= bounds.attempts_max then
        finish(batch, record, 'F', failure, nil, '', '', true)
        statuses[#statuses + 1] = 'ended'
      else
        return_to_group(batch, record, cause == 'evicted' and 'second' or 'head')
        if cause == 'unpulled' and record.e == '' then redis.call('HDEL', hash_key, 'b') end  -- it was not started
        if cause == 'unpulled' then add_event(batch, 'unpulled', record) else add_event(batch, 'requeued', record, cause) end
        statuses[#statuses + 1] = 'done'
      end
    end
  end
  send_batch(batch)
  return statuses
end

-- Stores what is new of an output: 'done' and whether anything was, or 'gap'.
local function store_output(prefix, record, offset, output, text)
  local key = prefix .. ':progress:' .. record.i
  local stored = redis.call('STRLEN', key)
  if offset > stored then return 'gap', false end
  if offset + #output <= stored then return 'done', false end
  redis.call('APPEND', key, string.sub(output, stored - offset + 1))
  if stored == 0 then
    record.e, record.y = integer(now_ms()), text == '1' and '1' or ''
    redis.call('HSET', record.k, 'e', record.e, 'y', record.y)
  end
  return 'done', true
end

-- args: incarnation, (queue id, hash key, attempt, offset, output, frame, text)…; answer: statuses
local function emit(keys, args)
  local prefix = keys[1]
  local bounds, at = read_bounds(args)
  local incarnation = args[at]
  local batch = open_batch(prefix, bounds)
  local statuses = {}
  for index = at + 1, #args, 7 do
    local record = read_request(args[index + 1])
    local status, new = 'stale', false
    if owns(record, args[index], incarnation, args[index + 2]) then
      status, new = store_output(prefix, record, tonumber(args[index + 3]), args[index + 4], args[index + 6])
      if new and args[index + 5] ~= '' then add_frame(batch, record.w, args[index + 5]) end
    end
    statuses[#statuses + 1] = status
  end
  send_batch(batch)
  return statuses
end

-- args: incarnation, (queue id, hash key, attempt, offset, output, frame, text, state, Result, event)…; answer: statuses
local function complete(keys, args)
  local prefix = keys[1]
  local bounds, at = read_bounds(args)
  local incarnation = args[at]
  local batch = open_batch(prefix, bounds)
  local statuses = {}
  for index = at + 1, #args, 10 do
    local id, hash_key, attempt, state = args[index], args[index + 1], args[index + 2], args[index + 7]
    local record = read_request(hash_key)
    local status = 'stale'
    if owns(record, id, incarnation, attempt) then
      status = store_output(prefix, record, tonumber(args[index + 3]), args[index + 4], args[index + 6])
      if status == 'done' then finish(batch, record, state, args[index + 8], nil, args[index + 5], args[index + 9], true) end
    elseif not record then
      local ended = read_terminal(prefix, hash_key)
      if ended and ended.id == id and ended.state == state and ended.attempts == tonumber(attempt)
        and ended.incarnation == incarnation then
        status = 'done'
      end
    end
    statuses[#statuses + 1] = status
  end
  send_batch(batch)
  return statuses
end
