-- Writes of a call: collected while it checks its requests, written at its end; and the steps that several calls share.

-- what a call writes at its end ----------------------------------------------------------------------------------------
-- A call may touch 500 requests, and each write costs the server several microseconds (the log of writes, above all). So what the
-- requests of a call have in common is collected and written once: messages (one entry a stream), counters, members of groups, sets.

local function open_batch(prefix, bounds)
  return {
    prefix = prefix, bounds = bounds, frames = {}, gateways = {}, events = {},
    counts = {}, counted = {}, kept = {}, groups = {}, group_ids = {}, returned = {}, left = {}, owners = {}, settled = {}, ended = {},
  }
end

local function add_frame(batch, gateway, frame)
  if gateway == '' then return end
  local frames = batch.frames[gateway]
  if not frames then
    frames = {}
    batch.frames[gateway] = frames
    batch.gateways[#batch.gateways + 1] = gateway
  end
  frames[#frames + 1] = pb_bytes(1, frame)
end

local function add_event(batch, kind, record, cause, extra)
  if kind ~= batch.event_kind or record.group ~= batch.event_group or record.owner ~= batch.event_owner
    or record.attempt ~= batch.event_attempt or cause ~= batch.event_cause then  -- mostly as in the event before
    batch.event_kind, batch.event_group, batch.event_owner = kind, record.group, record.owner
    batch.event_attempt, batch.event_cause = record.attempt, cause
    batch.event_begin = pb_uint(1, EVENT[kind]) .. pb_bytes(3, record.group) .. pb_bytes(4, record.owner)
      .. pb_uint(5, record.attempt) .. pb_bytes(8, cause or '')
  end
  batch.events[#batch.events + 1] = pb_bytes(1, batch.event_begin .. pb_bytes(2, record.id) .. pb_uint(6, record.number)
    .. pb_uint(7, record.accepted_ms) .. pb_uint(9, record.prompt_tokens) .. (extra or ''))
end

-- When the first output of a request that waits, or waited, was stored, for its event.
local function first_output(record)
  return pb_seconds(13, record.first_output_ms)
end

-- Groups that moved to one queue are one event: ids are most of the events of a chunk of a plan.
local GROUP_IDS_TAG = '\138\2'

local function add_moved_event(batch, instance, gids)
  local parts, tags = { pb_uint(1, EVENT.moved) .. pb_bytes(16, instance) }, {}
  for index, gid in ipairs(gids) do
    local length = #gid
    local tag = tags[length]
    if not tag then
      tag = GROUP_IDS_TAG .. varint(length)
      tags[length] = tag
    end
    parts[2 * index], parts[2 * index + 1] = tag, gid
  end
  batch.events[#batch.events + 1] = pb_bytes(1, table.concat(parts))
end

local function count(batch, field, by)
  if not batch.counts[field] then batch.counted[#batch.counted + 1] = field end
  batch.counts[field] = (batch.counts[field] or 0) + by
end

local function count_request(batch, record, by)
  count(batch, 'live', by)
  count(batch, 't:' .. escaped_tenant(batch.prefix, record.key), by)
  count(batch, 'c:' .. record.class, by)
end

-- Bytes that a request or its result holds, by what the bounds name.
local function count_bytes(batch, tenant, class, by)
  if by == 0 then return end
  count(batch, 'b', by)
  count(batch, 'bt:' .. tenant, by)
  count(batch, 'bc:' .. class, by)
end

local function kept_member(bytes, id, named, class)
  return integer(bytes) .. ' ' .. id .. ' ' .. #class .. ' ' .. class .. named
end

-- Bytes, tenant, request id (both escaped) and class of a counted result; nil for what is none.
local function kept_parts(member)
  local bytes, length, rest = string.match(member, '^(%d+) %S+ (%d+) (.*)$')
  if not bytes then return nil end
  local tenant, request_id = string.match(rest, '^([^:]*):(.*)$', tonumber(length) + 1)
  if not tenant then return nil end
  return tonumber(bytes), tenant, request_id, string.sub(rest, 1, tonumber(length))
end

local function group_keys(prefix, gid)
  return prefix .. ':group:' .. gid, prefix .. ':group_meta:' .. gid
end

-- The call's changes of a group: `added` (score, id…), `tokens` waiting, `live`.
local function changes_of(batch, gid)
  local group = batch.groups[gid]
  if not group then
    group = { added = {}, tokens = 0, live = 0 }
    batch.groups[gid] = group
    batch.group_ids[#batch.group_ids + 1] = gid
  end
  return group
end

-- Makes a request a waiting one of its group, at the place of its acceptance number.
local function join_group(batch, gid, record)
  local group = changes_of(batch, gid)
  local added = group.added
  added[#added + 1] = record.number
  added[#added + 1] = record.id
  group.tokens = group.tokens + record.prompt_tokens
end

local function leave_running(batch, record)
  local ids = batch.left[record.owner]
  if not ids then
    ids = {}
    batch.left[record.owner] = ids
    batch.owners[#batch.owners + 1] = record.owner
  end
  ids[#ids + 1] = record.id
  count(batch, 'running', -1)
end

local function write_groups(batch)
  for _, gid in ipairs(batch.group_ids) do
    local group, members, meta = batch.groups[gid], group_keys(batch.prefix, gid)
    if #group.added > 0 then redis.call('ZADD', members, unpack(group.added)) end
    if group.tokens ~= 0 then redis.call('HINCRBY', meta, 'prompt_tokens', integer(group.tokens)) end
    if group.live ~= 0 and redis.call('HINCRBY', meta, 'live', group.live) <= 0 then
      redis.call('DEL', meta)
      redis.call('HDEL', batch.prefix .. ':groups', gid)
    end
  end
end

local function write_counts(batch)
  if #batch.counted == 0 then return end
  local key = batch.prefix .. ':counts'
  local changed, gone = {}, {}
  for index, stored in ipairs(redis.call('HMGET', key, unpack(batch.counted))) do
    local field = batch.counted[index]
    local number = (tonumber(stored) or 0) + batch.counts[field]
    if number == 0 then
      gone[#gone + 1] = field
    else
      changed[#changed + 1] = field
      changed[#changed + 1] = integer(number)
    end
  end
  if #changed > 0 then redis.call('HSET', key, unpack(changed)) end
  if #gone > 0 then redis.call('HDEL', key, unpack(gone)) end
end

-- Results that an acceptance stops counting, beside its own work.
local SWEEP_MAX = 100

-- Members of `kept` whose window is over, the first `most`.
local function due_results(prefix, most)
  return redis.call('ZRANGEBYSCORE', prefix .. ':kept', '-inf', '(' .. integer(now_ms()), 'LIMIT', 0, most)
end

-- Stops counting results whose window is over, `most` in a call.
local function sweep_results(prefix, bounds, most)
  local due = due_results(prefix, most)
  if #due == 0 then return end
  local batch = open_batch(prefix, bounds)
  for _, member in ipairs(due) do
    local bytes, tenant, _, class = kept_parts(member)
    if bytes then count_bytes(batch, tenant, class, -bytes) end
  end
  redis.call('ZREM', prefix .. ':kept', unpack(due))
  write_counts(batch)
end

local function close_batch(batch)
  local prefix, queue = batch.prefix, batch.prefix .. ':queue'
  write_groups(batch)
  for _, owner in ipairs(batch.owners) do redis.call('SREM', prefix .. ':running:' .. owner, unpack(batch.left[owner])) end
  if #batch.settled > 0 then redis.call('XACK', queue, CONSUMER_GROUP, unpack(batch.settled)) end
  if #batch.ended > 0 then redis.call('XDEL', queue, unpack(batch.ended)) end
  if #batch.kept > 0 then redis.call('ZADD', prefix .. ':kept', unpack(batch.kept)) end
  write_counts(batch)
  for _, gateway in ipairs(batch.gateways) do
    local stream = prefix .. ':frames:' .. gateway
    redis.call('XADD', stream, 'MAXLEN', '~', batch.bounds.frames_max, '*', 'f', table.concat(batch.frames[gateway]))
    redis.call('PEXPIRE', stream, batch.bounds.frames_ttl_ms)
  end
  if #batch.events > 0 then
    redis.call('XADD', prefix .. ':events', 'MAXLEN', '~', batch.bounds.events_max, '*', 'e', table.concat(batch.events))
  end
end

local function send_control(batch, instance, kind, record)
  redis.call('XADD', batch.prefix .. ':ctl:' .. instance, 'MAXLEN', '~', batch.bounds.control_max, '*',
    'k', kind, 'i', record and record.id or '', 'a', record and integer(record.attempt) or '0')
end

local function instance_of(incarnation)
  return string.match(incarnation, '^(.*)/')
end

-- groups ---------------------------------------------------------------------------------------------------------------

-- Where groups are is one hash, so that a plan moves hundreds of them with one command, which is one entry of the log of writes too.
local ON, DRAINED = '+', '-'

-- The queue that a group is on, '' where it is on none, and the one that it is or was on last; nil where there is no such group.
local function place_of(prefix, gid)
  local stored = redis.call('HGET', prefix .. ':groups', gid)
  if not stored then return nil end
  local instance = string.sub(stored, 2)
  return string.sub(stored, 1, 1) == ON and instance or '', instance
end

-- The queue that a group is on by what is stored of it; nil where it is on none.
local function on_queue(stored)
  return stored and string.sub(stored, 1, 1) == ON and string.sub(stored, 2) or nil
end

local function serves(prefix, instance)
  return instance == UNASSIGNED or redis.call('HEXISTS', prefix .. ':registered', instance) == 1
end

-- Opens a group that is on no queue: `where` is 'head', 'second', 'end' or the id of the group in front of which it goes.
local function open_group(batch, gid, instance, where)
  local prefix = batch.prefix
  local list = prefix .. ':vq:' .. instance
  if where == 'head' then
    redis.call('LPUSH', list, gid)
  elseif where == 'second' then
    local head = redis.call('LINDEX', list, 0)
    if head then redis.call('LINSERT', list, 'AFTER', head, gid) else redis.call('RPUSH', list, gid) end
  elseif where == 'end' or redis.call('LINSERT', list, 'BEFORE', where, gid) < 1 then
    redis.call('RPUSH', list, gid)
  end
  redis.call('HSET', prefix .. ':groups', gid, ON .. instance)
  redis.call('HINCRBY', prefix .. ':vq_version', instance, 1)
  if instance ~= UNASSIGNED then send_control(batch, instance, 'wake') end
end

-- Takes waiting requests out of their group, and a group without waiting requests off its queue.
local function take_from_group(prefix, gid, ids, tokens)
  local members, meta = group_keys(prefix, gid)
  redis.call('ZREM', members, unpack(ids))
  redis.call('HINCRBY', meta, 'prompt_tokens', integer(-tokens))
  if redis.call('EXISTS', members) == 1 then return end
  local instance = place_of(prefix, gid)
  redis.call('LREM', prefix .. ':vq:' .. instance, 1, gid)
  redis.call('HSET', prefix .. ':groups', gid, DRAINED .. instance)
end

local function is_after(left, right)
  local left_ms, left_seq = string.match(left, '^(%d+)-(%d+)$')
  local right_ms, right_seq = string.match(right, '^(%d+)-(%d+)$')
  left_ms, right_ms = tonumber(left_ms), tonumber(right_ms)
  return left_ms > right_ms or (left_ms == right_ms and tonumber(left_seq) > tonumber(right_seq))
end

local function last_delivered(stream)
  for _, group in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
    local info = {}
    for index = 1, #group, 2 do info[group[index]] = group[index + 1] end
    if info['name'] == CONSUMER_GROUP then return info['last-delivered-id'] end
  end
  return '0-0'
end

-- Makes a planner find an accepted request: one that was read before is pending again, the others are yet to be read.
local function await_placement(prefix, id)
  local stream = prefix .. ':queue'
  if not is_after(id, last_delivered(stream)) then
    redis.call('XCLAIM', stream, CONSUMER_GROUP, 'leader', 0, id, 'FORCE', 'JUSTID')
  end
end

-- A request whose group is gone waits to be placed again.
local function unplace(batch, record)
  if record.state == 'R' then leave_running(batch, record) end
  record.state, record.owner, record.group = 'A', '', ''
  redis.call('HSET', record.key, 's', state_text(record))
  redis.call('HDEL', record.key, 'g')
  await_placement(batch.prefix, record.id)
  count(batch, 'unplaced', 1)
end

-- Returns a running request to its place in its group, opening the group if it drained meanwhile. `unstarted`: its pull was none.
local function return_to_group(batch, record, where, unstarted)
  local prefix, gid = batch.prefix, record.group
  if gid == '' then return unplace(batch, record) end
  local _, meta = group_keys(prefix, gid)
  leave_running(batch, record)
  local owner = record.owner
  record.state, record.owner = 'P', ''
  if unstarted then record.started_ms = '' end
  -- A call does the same to all that it returns, so those whose states were equal, as after a pull, have equal ones again.
  local state = batch.returned[record.stored_state]
  if not state then
    state = state_text(record)
    batch.returned[record.stored_state] = state
  end
  redis.call('HSET', record.key, 's', state)
  record.owner = owner  -- events name its owner
  join_group(batch, gid, record)
  local group = changes_of(batch, gid)
  if not group.slo_least_s then
    local stored = redis.call('HMGET', meta, 'first_deadline', 'slo_least')
    group.first_deadline_s, group.slo_least_s = tonumber(stored[1]), tonumber(stored[2])
    local instance, last = place_of(prefix, gid)
    if instance == '' then open_group(batch, gid, serves(prefix, last) and last or UNASSIGNED, where) end
  end
  local deadline_s = record.accepted_ms / 1000 + group.slo_least_s
  if deadline_s < group.first_deadline_s then
    group.first_deadline_s = deadline_s
    redis.call('HSET', meta, 'first_deadline', seconds(deadline_s))
  end
end

-- the end of a request -------------------------------------------------------------------------------------------------

-- `state`: any table with its `first_output_ms`.
local function read_progress(prefix, id, state)
  return state.first_output_ms ~= '' and redis.call('GET', prefix .. ':progress:' .. id) or ''
end

-- Progress, and before it its length where logprobs follow it.
local function with_logprobs(prefix, id, state, progress)
  if state.form ~= 'L' then return progress end
  return #progress .. ' ' .. progress .. (redis.call('GET', prefix .. ':logprobs:' .. id) or '')
end

-- All logprobs of a request that ends, with those of its last output, and how many bytes of them were stored; the key is deleted.
local function take_logprobs(prefix, id, record)
  if record.form ~= 'L' then return '', 0 end
  local key = prefix .. ':logprobs:' .. id
  local stored = redis.call('GET', key) or ''
  redis.call('DEL', key)
  return stored .. (record.last_logprobs or ''), #stored
end

-- Stores the Result and the last frame, and deletes the rest. `by_owner`: the owner takes the step and needs no word of it. `body` and
-- `progress` are read where they are nil. `record.stored_output`: bytes of `progress` that are counted, where not all are.
local function finish(batch, record, state, result, body, progress, frame, event, by_owner)
  local prefix, id = batch.prefix, record.id
  progress = progress or read_progress(prefix, id, record)
  local tenant, request_id = string.match(record.key, ':req:([^:]*):([^:]*)$', #prefix + 1)
  local finished_ms = now_ms()
  local model, ended_by = '', by_owner and record.owner or ''
  if not pb_has(result, 3) then model = pb_bytes(3, model_of(body or read_entry(prefix, id))) end
  local message = result .. pb_bytes(1, unescape(tenant)) .. pb_bytes(2, unescape(request_id)) .. model
    .. pb_uint(4, STATE_NUMBER[state]) .. pb_uint(9, record.attempt) .. pb_bytes(10, id) .. pb_bytes(11, ended_by)
    .. pb_bytes(8, pb_double(1, record.accepted_ms / 1000) .. pb_seconds(2, record.started_ms) .. pb_seconds(3, record.first_output_ms)
      .. pb_double(4, finished_ms / 1000) .. pb_seconds(5, record.placed_ms or ''))
  local logprobs, stored_logprobs = take_logprobs(prefix, id, record)
  local output = record.form == '1' and progress or logprobs .. pb_bytes(14, progress)
  local header = state .. integer(record.attempt) .. ' ' .. #progress .. ' ' .. id .. ' ' .. #ended_by .. ' ' .. ended_by .. '\n'
  redis.call('SET', result_key_of(prefix, record.key), record.digest .. header .. message .. output, 'PX', batch.bounds.result_ttl_ms)

  if frame == '' then frame = pb_bytes(1, id) .. pb_uint(2, record.attempt) end
  add_frame(batch, record.gateway, frame .. pb_bytes(6, message))
  add_event(batch, state, record, nil, record.state == 'P' and first_output(record) or event)

  if record.state == 'A' then
    count(batch, 'unplaced', -1)
  elseif record.state == 'P' then
    take_from_group(prefix, record.group, { id }, record.prompt_tokens)
  elseif record.state == 'R' then
    leave_running(batch, record)
    if not by_owner then send_control(batch, instance_of(record.owner), 'cancel', record) end
  end
  if record.group ~= '' then
    local group = changes_of(batch, record.group)
    group.live = group.live - 1
  end
  if record.expiry_ms ~= '' then redis.call('ZREM', prefix .. ':expiry', id) end
  batch.settled[#batch.settled + 1] = id  -- also one that was placed unread may be pending
  batch.ended[#batch.ended + 1] = id
  if progress == '' then redis.call('DEL', record.key) else redis.call('DEL', record.key, prefix .. ':progress:' .. id) end
  count_request(batch, record, -1)
  local held = RECORD_BYTES + #result + #progress + #logprobs
  local kept = batch.kept
  kept[#kept + 1] = integer(finished_ms + tonumber(batch.bounds.result_ttl_ms))
  kept[#kept + 1] = kept_member(held, id, tenant .. ':' .. request_id, record.class)
  count_bytes(batch, tenant, record.class, held - record.bytes - (record.stored_output or #progress) - stored_logprobs)
end
