-- accept, attach, cancel, erase, expire, find: what gateways call.

-- Where results hold more places than the `live` requests of a full bound: ms until the window of the first is over; else ''.
local function frees_after_ms(prefix, live)
  local key = prefix .. ':kept'
  if redis.call('ZCARD', key) <= live then return '' end
  return integer(math.max(1, tonumber(redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')[2]) - now_ms()))
end

-- args: hash key, body, digest, gateway, slo class, prompt tokens, expire after (ms or ''), queue_max, tenant_max, class_max,
--       queue_bytes_max, tenant_bytes_max, class_bytes_max (0: no bound)
-- answer: queue id, acceptance number, accepted ms, state, duplicate
local function accept(keys, args)
  local prefix = keys[1]
  local bounds, at = read_bounds(args)
  local hash_key, body, digest, gateway, class, prompt_tokens, expire_after_ms = unpack(args, at, at + 6)
  local live = read_request(hash_key)
  if live then
    if live.digest ~= digest then return { err = 'QLMCONFLICT the request id stands for another body' } end
    return { live.id, integer(live.number), integer(live.accepted_ms), live.state, '1' }
  end
  local ended = read_terminal(prefix, hash_key)
  if ended then
    if ended.digest ~= digest then return { err = 'QLMCONFLICT the request id stands for another body' } end
    return { ended.id, '0', '0', ended.state, '1' }
  end
  local tenant, bytes = escaped_tenant(prefix, hash_key), RECORD_BYTES + #body
  sweep_results(prefix, bounds, SWEEP_MAX)
  local counts = redis.call('HMGET', prefix .. ':counts',
    'live', 't:' .. tenant, 'c:' .. class, 'b', 'bt:' .. tenant, 'bc:' .. class)
  for index, bound in ipairs({ 'queue', 'tenant', 'class' }) do
    if (tonumber(counts[index]) or 0) >= tonumber(args[at + 6 + index]) then
      return { err = 'QLMFULL ' .. bound .. ' ' .. args[at + 6 + index] }
    end
  end
  for index, bound in ipairs({ 'queue', 'tenant', 'class' }) do
    local held, limit = tonumber(counts[3 + index]) or 0, tonumber(args[at + 9 + index])
    if limit > 0 and held + bytes > limit then
      return { err = table.concat({ 'QLMFULL', bound, integer(limit), integer(held), frees_after_ms(prefix, tonumber(counts[index]) or 0) }, ' ') }
    end
  end
  local number = redis.call('INCR', prefix .. ':acceptance')
  local accepted_ms = now_ms()
  local id = redis.call('XADD', prefix .. ':queue', '*', 'r', body, 'k', hash_key)
  redis.call('HSET', hash_key, 'f', fixed_text(digest, id, number, accepted_ms, prompt_tokens, class), 's', NEW_STATE, 'w', gateway,
    'b', bytes)
  if expire_after_ms ~= '' then
    local expiry_ms = integer(accepted_ms + tonumber(expire_after_ms))
    redis.call('HSET', hash_key, 'x', expiry_ms)
    redis.call('ZADD', prefix .. ':expiry', expiry_ms, id)
  end
  local batch = open_batch(prefix, bounds)
  local record = {
    key = hash_key, id = id, number = number, accepted_ms = accepted_ms, prompt_tokens = tonumber(prompt_tokens), class = class,
    group = '', owner = '', attempt = 0,
  }
  count_request(batch, record, 1)
  count_bytes(batch, tenant, class, bytes)
  count(batch, 'unplaced', 1)
  add_event(batch, 'accepted', record)
  close_batch(batch)
  return { id, integer(number), integer(accepted_ms), 'A', '0' }
end

-- args: hash key, gateway ('' to read only), offset in bytes
-- answer: 'live' or 'ended', the record (with a body of the model alone), progress from the offset (of a live request with its logprobs,
-- as in `with_logprobs`), bytes produced, 'L' where there are logprobs
local function attach(keys, args)
  local prefix = keys[1]
  local bounds, at = read_bounds(args)
  local hash_key, gateway, offset = args[at], args[at + 1], tonumber(args[at + 2])
  local record = read_request(hash_key)
  if not record then
    local ended = read_terminal(prefix, hash_key)
    if not ended then return NOT_FOUND end
    if offset > ended.produced then return { err = 'QLMOFFSET ' .. ended.produced } end
    local progress = offset < ended.produced and string.sub(ended.result, offset - ended.produced) or ''
    return { 'ended', terminal_answer(ended), progress, integer(ended.produced), '' }
  end
  local progress_key = prefix .. ':progress:' .. record.id
  local produced = redis.call('STRLEN', progress_key)
  if offset > produced then return { err = 'QLMOFFSET ' .. produced } end
  if gateway ~= '' and gateway ~= record.gateway then
    redis.call('HSET', hash_key, 'w', gateway)
    record.gateway = gateway
    if record.state == 'R' then
      send_control(open_batch(prefix, bounds), instance_of(record.owner), 'rebound', record)
    end
  end
  local model = pb_bytes(1, model_of(read_entry(prefix, record.id)))
  local progress, form = redis.call('GETRANGE', progress_key, offset, -1), ''
  if record.form == 'L' then
    local logprobs_key = prefix .. ':logprobs:' .. record.id
    local from = integer(math.floor(offset * redis.call('STRLEN', logprobs_key) / produced))
    progress, form = #progress .. ' ' .. progress .. redis.call('GETRANGE', logprobs_key, from, -1), 'L'
  end
  return { 'live', live_answer(record, model), progress, integer(produced), form }
end

-- args: hash key, Result; answer: the terminal state
local function cancel(keys, args)
  local prefix = keys[1]
  local bounds, at = read_bounds(args)
  local record = read_request(args[at])
  if not record then
    local ended = read_terminal(prefix, args[at])
    if not ended then return NOT_FOUND end
    return ended.state
  end
  local batch = open_batch(prefix, bounds)
  finish(batch, record, 'X', args[at + 1], nil, nil, '', '', false)
  close_batch(batch)
  return 'X'
end

local KEPT_WITHIN_MS = 50  -- between the end of a result's key and its score in `kept`, which one call set

-- args: hash key, Result; answer: the terminal state of a request whose Result is gone
local function erase(keys, args)
  local prefix = keys[1]
  local state = cancel(keys, args)
  if state == NOT_FOUND then return state end
  local bounds, at = read_bounds(args)
  local ended, name = read_terminal(prefix, args[at]), result_key_of(prefix, args[at])
  local batch, ends_ms = open_batch(prefix, bounds), now_ms() + redis.call('PTTL', name)
  local from, to = integer(ends_ms - KEPT_WITHIN_MS), integer(ends_ms + KEPT_WITHIN_MS)
  for _, member in ipairs(redis.call('ZRANGEBYSCORE', prefix .. ':kept', from, to)) do
    local bytes, tenant, _, class = kept_parts(member)
    if bytes and string.match(member, ' (%S+)') == ended.id then
      redis.call('ZREM', prefix .. ':kept', member)
      count_bytes(batch, tenant, class, -bytes)
    end
  end
  write_counts(batch)
  redis.call('SET', name, ERASED, 'KEEPTTL')
  return state
end

-- answer: (field, number)… of the counters; results whose window is over since the last sweep: their members of `kept`
local function held(keys)
  return { redis.call('HGETALL', keys[1] .. ':counts'), due_results(keys[1], BATCH_MAX) }
end

-- args: Result; answer: how many ended
local function expire(keys, args)
  local prefix = keys[1]
  local bounds, at = read_bounds(args)
  sweep_results(prefix, bounds, BATCH_MAX)
  local batch = open_batch(prefix, bounds)
  local ids = redis.call('ZRANGEBYSCORE', prefix .. ':expiry', '-inf', integer(now_ms()), 'LIMIT', 0, BATCH_MAX)
  for _, id in ipairs(ids) do
    local record, body = read_by_id(prefix, id)
    finish(batch, record, 'E', args[at], body, nil, '', '', false)
  end
  close_batch(batch)
  return #ids
end

-- args: hash key; answer: 'live' or 'ended', the record
local function find(keys, args)
  local prefix = keys[1]
  local _, at = read_bounds(args)
  local record = read_request(args[at])
  if record then return { 'live', live_answer(record, (read_entry(prefix, record.id))) } end
  local ended = read_terminal(prefix, args[at])
  if not ended then return NOT_FOUND end
  return { 'ended', terminal_answer(ended) }
end

-- args: hash key; answer: waiting requests that its virtual queue serves before it
local function requests_ahead(keys, args)
  local prefix = keys[1]
  local _, at = read_bounds(args)
  local record = read_request(args[at])
  if not record then
    if read_terminal(prefix, args[at]) then return { '', 0 } end
    return NOT_FOUND
  end
  if record.state ~= 'P' then return { '', 0 } end
  local ahead = redis.call('ZRANK', group_keys(prefix, record.group), record.id)
  local instance = place_of(prefix, record.group)
  for _, gid in ipairs(redis.call('LRANGE', prefix .. ':vq:' .. instance, 0, BATCH_MAX - 1)) do
    if gid == record.group then break end
    ahead = ahead + redis.call('ZCARD', prefix .. ':group:' .. gid)
  end
  return { instance, ahead }
end
