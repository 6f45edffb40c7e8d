-- pull, unpull, emit, complete, requeue: what agents call.

local function owns(record, id, incarnation, attempt)
  return record and record.id == id and record.state == 'R' and record.owner == incarnation and record.attempt == tonumber(attempt)
end

-- The beginning of a virtual queue: the head group (id, waiting, acceptance of its first waiting request in ms, its record) or an empty
-- table, and of `behind_max` groups behind it: model, SLO class, SLO kind, first deadline, how many wait.
local function head_answer(prefix, list, behind_max)
  local gids = redis.call('LRANGE', list, 0, behind_max)
  if #gids == 0 then return {}, {} end
  local members, meta = group_keys(prefix, gids[1])
  local _, hash_key = read_entry(prefix, redis.call('ZRANGE', members, 0, 0)[1])
  local head = {
    gids[1], ON .. string.match(list, ':vq:(.*)$'), redis.call('ZCARD', members), integer(read_request(hash_key).accepted_ms), redis.call('HGETALL', meta),
  }
  local behind = {}
  for index = 2, #gids do
    local its_members, its_meta = group_keys(prefix, gids[index])
    for _, field in ipairs(redis.call('HMGET', its_meta, 'model', 'slo_class', 'slo_kind', 'first_deadline')) do behind[#behind + 1] = field or '' end
    behind[#behind + 1] = redis.call('ZCARD', its_members)
  end
  return head, behind
end

-- The state of a waiting request after a pull, with the `s` that it writes.
local function pulled_state(stored, incarnation, now)
  local state = read_state(stored)
  state.state, state.owner, state.attempt = 'R', incarnation, state.attempt + 1
  if state.started_ms == '' then state.started_ms = integer(now) end
  state.stored = state_text(state)
  return state
end

-- Takes waiting requests of the first group, as far as `room` goes, and ends those that have expired. `room` shows the rest.
-- This is what agents wait for, so it reads and parses no more than it needs: equal states once, since most of a group never ran.
local function pull_from_group(batch, answer, room, gid, model, incarnation, expired_result)
  local prefix, now = batch.prefix, now_ms()
  local members = group_keys(prefix, gid)
  local ids, tokens, states, event, of_model = {}, 0, {}, { group = gid, owner = incarnation }, pb_bytes(10, model)
  local waiting = redis.call('ZRANGE', members, 0, math.min(room.requests, room.looks) - 1)
  if #waiting == 0 then error('group ' .. gid .. ' is on a queue and has no members') end  -- else `pull` would go on for ever
  for _, id in ipairs(waiting) do
    local body, hash_key = read_entry(prefix, id)
    local fields = redis.call('HMGET', hash_key, 'f', 's', 'w', 'x')
    room.looks = room.looks - 1
    if tenant_is_paused(room.paused, prefix, hash_key) then
      if room.held_back == 0 then
        room.requests = 0  -- the rest is for the next call
        break
      end
      hold_back(batch, read_request(hash_key))
      room.held_back = room.held_back - 1
    elseif fields[4] and tonumber(fields[4]) <= now then
      finish(batch, read_request(hash_key), 'E', expired_result, body, nil, '', '', false)
    else
      local fixed = fields[1]
      local state = states[fields[2]] or pulled_state(fields[2], incarnation, now)
      states[fields[2]] = state
      local number, accepted_ms, prompt_tokens = string.match(fixed, '^(%d+) (%d+) (%d+)', 18 + #id)
      prompt_tokens = tonumber(prompt_tokens)
      local progress = read_progress(prefix, id, state)
      local need = prompt_tokens + math.ceil(#progress / 4) + room.reserve
      -- A request that may have broken an engine runs alone, so that it breaks no other attempt.
      local suspect = state.failed > 0 and not (room.first and (room.any_size or (room.suspects and state.failed == 1)))
      if suspect or (need > room.kv_tokens and not room.any_size) then
        room.blocked_tokens, room.suspect = need, suspect
        break
      end
      room.requests, room.kv_tokens, room.any_size, room.first = room.requests - 1, room.kv_tokens - need, false, false
      redis.call('HSET', hash_key, 's', state.stored)
      ids[#ids + 1], tokens = id, tokens + prompt_tokens
      event.id, event.attempt, event.prompt_tokens = id, state.attempt, prompt_tokens
      event.number, event.accepted_ms = tonumber(number), tonumber(accepted_ms)
      add_event(batch, 'pulled', event, nil, of_model)
      local at = #answer
      answer[at + 1], answer[at + 2], answer[at + 3], answer[at + 4] = hash_key, fixed, state.stored, fields[3]
      answer[at + 5], answer[at + 6], answer[at + 7] = gid, body, with_logprobs(prefix, id, state, progress)
      if state.failed > 0 then
        room.requests = 0
        break
      end
    end
  end
  if #ids == 0 then return end
  take_from_group(prefix, gid, ids, tokens)
  redis.call('SADD', prefix .. ':running:' .. incarnation, unpack(ids))
  count(batch, 'running', #ids)
end

-- args: incarnation, lease token, model, requests_max, kv tokens, output reserve, owned aside, Result of expired requests,
--       '1' where a request that has failed once may be given, groups behind the head to report
-- answer: blocked tokens, head group and groups behind it (`head_answer`), '1' where the first is to run alone, then seven strings of each request, as in `live_answer` with the
--         progress, but flat: a table for each costs the server a third of its answer
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
  local room = {
    requests = requests_max, kv_tokens = kv_tokens, reserve = reserve, looks = BATCH_MAX, blocked_tokens = 0,
    first = true, suspects = args[at + 8] == '1',
    any_size = redis.call('SCARD', running) <= tonumber(args[at + 6]),  -- the first request of an idle incarnation
    paused = read_pauses(prefix), held_back = HELD_BACK_MAX,
  }
  if room.paused then clear_head(batch, room, instance) end
  local answer = { '0', {}, {}, '' }
  while model ~= '' and room.requests > 0 and room.looks > 0 and room.blocked_tokens == 0 do
    local gid = redis.call('LINDEX', list, 0)
    if not gid then break end
    local _, meta = group_keys(prefix, gid)
    if redis.call('HGET', meta, 'model') ~= model then break end
    pull_from_group(batch, answer, room, gid, model, incarnation, args[at + 7])
    if room.paused then clear_head(batch, room, instance) end
  end
  answer[1], answer[4] = integer(room.blocked_tokens), room.suspect and '1' or ''
  answer[2], answer[3] = head_answer(prefix, list, tonumber(args[at + 9]))
  close_batch(batch)
  return answer
end

-- args: incarnation, ids; answer: (live record with progress)… of those that it owns
local function owned(keys, args)
  local prefix = keys[1]
  local _, at = read_bounds(args)
  local found = {}
  for index = at + 1, #args do
    local record, body = read_by_id(prefix, args[index])
    if record and record.owner == args[at] then
      local progress = read_progress(prefix, record.id, record)
      found[#found + 1] = live_answer(record, body, with_logprobs(prefix, record.id, record, progress))
    end
  end
  return found
end

-- args: incarnation, cause ('unpulled' or why it is requeued), where a group is opened again ('head' or 'second'), failure,
--       (queue id, hash key, attempt)…; answer: statuses
local function give_back(keys, args)
  local prefix = keys[1]
  local bounds, at = read_bounds(args)
  local incarnation, cause, where, failure = args[at], args[at + 1], args[at + 2], args[at + 3]
  local unpulled, failed = cause == 'unpulled', cause == 'failed'
  local batch = open_batch(prefix, bounds)
  local statuses, states = {}, {}
  for index = at + 4, #args, 3 do
    local id, hash_key = args[index], args[index + 1]
    local record = read_returnable(states, hash_key)
    if not owns(record, id, incarnation, args[index + 2]) then
      statuses[#statuses + 1] = 'stale'
    else
      if failed then record.failed = record.failed + 1 end
      if cause == 'suspected' then record.failed = math.min(record.failed + 1, bounds.attempts_max - 1) end
      if failed and record.failed >= bounds.attempts_max then
        record = read_request(hash_key)
        record.failed = record.failed + 1
        finish(batch, record, 'F', failure, nil, nil, '', '', true)
        statuses[#statuses + 1] = 'ended'
      else
        return_to_group(batch, record, where, unpulled and record.first_output_ms == '')
        add_event(batch, unpulled and 'unpulled' or 'requeued', record, not unpulled and cause or nil, first_output(record))
        statuses[#statuses + 1] = 'done'
      end
    end
  end
  close_batch(batch)
  return statuses
end

-- Where the caller owns a request: its gateway, whether it has output, and its fixed part. It is called for each token, so it reads and parses no more.
local function read_owned(hash_key, id, incarnation, attempt)
  local fields = redis.call('HMGET', hash_key, 'f', 's', 'w')
  if not fields[1] or string.sub(fields[1], 17, 17 + #id) ~= id .. ' ' then return nil end
  local run, first_output_ms, owner = string.match(fields[2], '^R(%d+) %d+ %d* (%d*) [1L]? (.*)$')
  if owner ~= incarnation or run ~= attempt then return nil end
  return fields[3], first_output_ms ~= '', fields[1]
end

-- Notes that the first output of a request is there. `form` as in `emit`.
local function note_first_output(record, form)
  record.first_output_ms, record.form = integer(now_ms()), #form > 1 and 'L' or form == '1' and '1' or ''
end

-- The logprobs of the last `bytes` of `output`, of which `form` has equally many bytes for each token.
local function last_logprobs(form, output, bytes)
  return string.sub(form, -(#form * bytes / #output))
end

local function store_first_output(hash_key, form)
  local record = read_request(hash_key)
  note_first_output(record, form)
  redis.call('HSET', hash_key, 's', state_text(record))
end

-- args: incarnation, (queue id, hash key, attempt, offset, output, frame, form)…; answer: statuses
-- form: '0' for token ids, '1' for text, else token ids, and this is their logprobs
local function emit(keys, args)
  local prefix = keys[1]
  local bounds, at = read_bounds(args)
  local incarnation = args[at]
  local batch = open_batch(prefix, bounds)
  local statuses = {}
  for index = at + 1, #args, 7 do
    local id, hash_key, offset, output = args[index], args[index + 1], tonumber(args[index + 3]), args[index + 4]
    local gateway, has_output, fixed = read_owned(hash_key, id, incarnation, args[index + 2])
    local status = gateway and 'done' or 'stale'
    if gateway then
      local key = prefix .. ':progress:' .. id
      local stored = has_output and redis.call('STRLEN', key) or 0
      if offset > stored then
        status = 'gap'
      elseif offset + #output > stored then
        local form = args[index + 6]
        local logprobs = #form > 1 and last_logprobs(form, output, offset + #output - stored) or ''
        redis.call('APPEND', key, string.sub(output, stored - offset + 1))
        if logprobs ~= '' then redis.call('APPEND', prefix .. ':logprobs:' .. id, logprobs) end
        local class = string.match(fixed, '^%S+ %d+ %d+ %d+ (.*)$', 17)
        count_bytes(batch, escaped_tenant(prefix, hash_key), class, offset + #output - stored + #logprobs)
        if not has_output then store_first_output(hash_key, form) end
        if args[index + 5] ~= '' then add_frame(batch, gateway, args[index + 5]) end
      end
    end
    statuses[#statuses + 1] = status
  end
  close_batch(batch)
  return statuses
end

-- All output with the last one, which need not be stored any more; nil where it would leave a gap. Notes the last one's logprobs.
local function with_output(prefix, record, offset, output, form)
  local progress = read_progress(prefix, record.id, record)
  record.stored_output = #progress
  if offset > #progress then return nil end
  if offset + #output <= #progress then return progress end
  if progress == '' then note_first_output(record, form) end
  if #form > 1 then record.last_logprobs = last_logprobs(form, output, offset + #output - #progress) end
  return progress .. string.sub(output, #progress - offset + 1)
end

-- args: incarnation, (queue id, hash key, attempt, offset, output, frame, form, state, Result, event)…; answer: statuses
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
      local progress = with_output(prefix, record, tonumber(args[index + 3]), args[index + 4], args[index + 6])
      status = progress and 'done' or 'gap'
      if progress then finish(batch, record, state, args[index + 8], nil, progress, args[index + 5], args[index + 9], true) end
    elseif not record then
      local ended = read_terminal(prefix, hash_key)
      if ended and ended.id == id and ended.state == state and ended.attempts == tonumber(attempt)
        and ended.incarnation == incarnation then
        status = 'done'
      end
    end
    statuses[#statuses + 1] = status
  end
  close_batch(batch)
  return statuses
end
