-- What all scripts share. KEYS[1] is the queue's prefix "{<queue>}"; keys are described in keys.py.
-- The scripts write protobuf by hand: serialized messages are concatenated, and a later field overrides an earlier one.

local STATE_NUMBER = { C = 4, F = 5, X = 6, E = 7 }
local EVENT = { accepted = 1, placed = 2, pulled = 3, unpulled = 4, requeued = 5, C = 6, F = 7, X = 8, E = 9 }
local REQUEST_FIELDS = { 'i', 'd', 's', 'n', 't', 'w', 'l', 'c', 'x', 'g', 'o', 'a', 'f', 'y', 'b', 'e' }
local UNASSIGNED = 'unassigned'
local CONSUMER_GROUP = 'planner'
local BATCH_MAX = 500

local function integer(number)
  return string.format('%.0f', number)
end

local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- protobuf -----------------------------------------------------------------------------------------------------------

local function varint(number)
  local bytes = {}
  while number >= 128 do
    local low = number % 128
    bytes[#bytes + 1] = string.char(low + 128)
    number = (number - low) / 128
  end
  bytes[#bytes + 1] = string.char(number)
  return table.concat(bytes)
end

local function pb_uint(field, number)
  number = tonumber(number) or 0
  if number == 0 then return '' end
  return varint(field * 8) .. varint(number)
end

local function pb_bytes(field, value)
  if value == '' then return '' end
  return varint(field * 8 + 2) .. varint(#value) .. value
end

local function pb_double(field, number)
  return varint(field * 8 + 1) .. struct.pack('<d', number)
end

-- Milliseconds that are kept as a string, '' where it never happened, as a field of seconds.
local function pb_seconds(field, milliseconds)
  if milliseconds == '' then return '' end
  return pb_double(field, tonumber(milliseconds) / 1000)
end

-- Reads a varint at `position`: the number and the position after it, or nil.
local function read_varint(bytes, position)
  local number, scale = 0, 1
  for _ = 1, 8 do
    local byte = string.byte(bytes, position)
    if not byte then return nil end
    position = position + 1
    number = number + (byte % 128) * scale
    if byte < 128 then return number, position end
    scale = scale * 128
  end
  return nil
end

-- Whether a serialized message has a field on its top level.
local function pb_has(bytes, field)
  local position = 1
  while position <= #bytes do
    local tag, value
    tag, position = read_varint(bytes, position)
    if not tag then return false end
    if math.floor(tag / 8) == field then return true end
    local wire = tag % 8
    if wire == 0 then
      value, position = read_varint(bytes, position)
      if not value then return false end
    elseif wire == 1 then position = position + 8
    elseif wire == 2 then
      value, position = read_varint(bytes, position)
      if not value then return false end
      position = position + value
    elseif wire == 5 then position = position + 4
    else return false end
  end
  return false
end

-- `model` of a serialized Request: its first field.
local function model_of(body)
  if string.byte(body, 1) ~= 10 then return '' end
  local length, position = read_varint(body, 2)
  if not length or position + length - 1 > #body then return '' end
  return string.sub(body, position, position + length - 1)
end

-- requests -----------------------------------------------------------------------------------------------------------

-- The record of a live request, or nil. Missing numbers are 0, missing strings ''.
local function read_request(hash_key)
  local values = redis.call('HMGET', hash_key, unpack(REQUEST_FIELDS))
  if not values[3] then return nil end
  local record = { k = hash_key }
  for index, field in ipairs(REQUEST_FIELDS) do record[field] = values[index] or '' end
  record.n, record.t, record.l = tonumber(record.n), tonumber(record.t), tonumber(record.l)
  record.a, record.f = tonumber(record.a) or 0, tonumber(record.f) or 0
  return record
end

-- Body and hash key of a queue id, or nil.
local function read_entry(prefix, id)
  local entries = redis.call('XRANGE', prefix .. ':queue', id, id)
  if #entries == 0 then return nil end
  local fields = entries[1][2]
  if fields[1] == 'r' then return fields[2], fields[4] end
  return fields[4], fields[2]
end

local function read_by_id(prefix, id)
  local body, hash_key = read_entry(prefix, id)
  if not body then return nil end
  return read_request(hash_key), body
end

local function result_key_of(prefix, hash_key)
  return prefix .. ':result:' .. string.sub(hash_key, #prefix + 6)
end

local function unescape(name)
  return (string.gsub(name, '%%(%x%x)', function(hex) return string.char(tonumber(hex, 16)) end))
end

local function escaped_tenant(prefix, hash_key)
  return string.match(hash_key, ':req:([^:]*):', #prefix + 1)
end

-- The stored end of a request, or nil: state, attempts, produced bytes, queue id, incarnation, digest, Result.
local function read_terminal(prefix, hash_key)
  local stored = redis.call('GET', result_key_of(prefix, hash_key))
  if not stored then return nil end
  local attempts, produced, id, length, start = string.match(stored, '^(%d+) (%d+) (%S+) (%d+) ()', 18)
  local incarnation_end = start + tonumber(length)
  return {
    digest = string.sub(stored, 1, 16), state = string.sub(stored, 17, 17), attempts = tonumber(attempts),
    produced = tonumber(produced), id = id, incarnation = string.sub(stored, start, incarnation_end - 1),
    result = string.sub(stored, incarnation_end + 1),
  }
end

-- An answer of twelve strings that LiveRequest is made of.
local function live_answer(record, body)
  return {
    record.i, record.k, integer(record.n), integer(record.t), record.s, record.g, record.o,
    integer(record.a), integer(record.f), record.w, body, record.y,
  }
end

local function terminal_answer(record)
  return { record.state, record.digest, record.id, integer(record.attempts), record.result }
end

-- messages that a script sends: collected, then one entry a stream ------------------------------------------------------

local function open_batch(prefix, bounds)
  return { prefix = prefix, bounds = bounds, frames = {}, gateways = {}, events = {} }
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
  local event = pb_uint(1, EVENT[kind]) .. pb_bytes(2, record.i) .. pb_bytes(3, record.g) .. pb_bytes(4, record.o)
    .. pb_uint(5, record.a) .. pb_uint(6, record.n) .. pb_uint(7, record.t) .. pb_bytes(8, cause or '')
    .. pb_uint(9, record.l) .. (extra or '')
  batch.events[#batch.events + 1] = pb_bytes(1, event)
end

local function send_batch(batch)
  for _, gateway in ipairs(batch.gateways) do
    local stream = batch.prefix .. ':frames:' .. gateway
    redis.call('XADD', stream, 'MAXLEN', '~', batch.bounds.frames_max, '*', 'f', table.concat(batch.frames[gateway]))
    redis.call('PEXPIRE', stream, batch.bounds.frames_ttl_ms)
  end
  if #batch.events > 0 then
    redis.call('XADD', batch.prefix .. ':events', 'MAXLEN', '~', batch.bounds.events_max, '*', 'e', table.concat(batch.events))
  end
end

local function send_control(batch, instance, kind, record)
  redis.call('XADD', batch.prefix .. ':ctl:' .. instance, 'MAXLEN', '~', batch.bounds.control_max, '*',
    'k', kind, 'i', record and record.i or '', 'a', record and integer(record.a) or '0')
end

local function instance_of(incarnation)
  return string.match(incarnation, '^(.*)/')
end

-- counters -----------------------------------------------------------------------------------------------------------

local function count(prefix, field, by)
  local key = prefix .. ':counts'
  if redis.call('HINCRBY', key, field, by) == 0 then redis.call('HDEL', key, field) end
end

local function count_request(prefix, record, by)
  count(prefix, 'live', by)
  count(prefix, 't:' .. escaped_tenant(prefix, record.k), by)
  count(prefix, 'c:' .. record.c, by)
end

-- groups ---------------------------------------------------------------------------------------------------------------

local function group_keys(prefix, gid)
  return prefix .. ':group:' .. gid, prefix .. ':group_meta:' .. gid
end

local function serves(prefix, instance)
  return instance == UNASSIGNED or redis.call('HEXISTS', prefix .. ':registered', instance) == 1
end

-- Opens a group that is on no queue: `where` is 'head', 'second', 'end' or the id of the group in front of which it goes.
local function open_group(batch, gid, instance, where)
  local prefix = batch.prefix
  local _, meta = group_keys(prefix, gid)
  local list = prefix .. ':vq:' .. instance
  if where == 'head' then
    redis.call('LPUSH', list, gid)
  elseif where == 'second' then
    local head = redis.call('LINDEX', list, 0)
    if head then redis.call('LINSERT', list, 'AFTER', head, gid) else redis.call('RPUSH', list, gid) end
  elseif where == 'end' or redis.call('LINSERT', list, 'BEFORE', where, gid) < 1 then
    redis.call('RPUSH', list, gid)
  end
  redis.call('HSET', meta, 'vq', instance, 'last_vq', instance)
  redis.call('HINCRBY', meta, 'version', 1)
  redis.call('HINCRBY', prefix .. ':vq_version', instance, 1)
  if instance ~= UNASSIGNED then send_control(batch, instance, 'wake') end
end

-- Takes a group without waiting requests off its queue.
local function close_if_drained(prefix, gid)
  local members, meta = group_keys(prefix, gid)
  if redis.call('EXISTS', members) == 1 then return end
  local instance = redis.call('HGET', meta, 'vq')
  if instance and instance ~= '' then
    redis.call('LREM', prefix .. ':vq:' .. instance, 1, gid)
    redis.call('HSET', meta, 'vq', '')
    redis.call('HINCRBY', meta, 'version', 1)
  end
end

local function take_from_group(prefix, record)
  local members, meta = group_keys(prefix, record.g)
  redis.call('ZREM', members, record.i)
  redis.call('HINCRBY', meta, 'prompt_tokens', -record.l)
  close_if_drained(prefix, record.g)
end

-- Returns a running request to its place in its group, opening the group if it drained meanwhile.
local function return_to_group(batch, record, where)
  local prefix = batch.prefix
  local members, meta = group_keys(prefix, record.g)
  redis.call('SREM', prefix .. ':running:' .. record.o, record.i)
  redis.call('HSET', record.k, 's', 'P')
  redis.call('HDEL', record.k, 'o')
  count(prefix, 'running', -1)
  redis.call('ZADD', members, integer(record.n), record.i)
  redis.call('HINCRBY', meta, 'prompt_tokens', record.l)
  local place = redis.call('HMGET', meta, 'vq', 'last_vq')
  if place[1] == '' then
    local instance = place[2]
    if not serves(prefix, instance) then instance = UNASSIGNED end
    open_group(batch, record.g, instance, where)
  end
end

-- the end of a request -------------------------------------------------------------------------------------------------

-- Stores the Result and the last frame, and deletes the rest. `by_owner`: the owner takes the step and needs no word of it.
local function finish(batch, record, state, result, body, frame, event, by_owner)
  local prefix, id = batch.prefix, record.i
  local progress_key = prefix .. ':progress:' .. id
  local progress = redis.call('GET', progress_key) or ''
  local tenant, request_id = string.match(record.k, ':req:([^:]*):([^:]*)$', #prefix + 1)
  local finished_ms = now_ms()
  local model, ended_by = '', by_owner and record.o or ''
  if not pb_has(result, 3) then model = pb_bytes(3, model_of(body or read_entry(prefix, id))) end
  local told = result .. pb_bytes(1, unescape(tenant)) .. pb_bytes(2, unescape(request_id)) .. model
    .. pb_uint(4, STATE_NUMBER[state]) .. pb_uint(9, record.a) .. pb_bytes(10, id) .. pb_bytes(11, ended_by)
    .. pb_bytes(8, pb_double(1, record.t / 1000) .. pb_seconds(2, record.b) .. pb_seconds(3, record.e)
      .. pb_double(4, finished_ms / 1000))
  local output = record.y == '1' and progress or pb_bytes(14, progress)
  local header = record.d .. state .. integer(record.a) .. ' ' .. #progress .. ' ' .. id .. ' ' .. #ended_by .. ' ' .. ended_by .. '\n'
  redis.call('SET', result_key_of(prefix, record.k), header .. told .. output, 'PX', batch.bounds.result_ttl_ms)

  if frame == '' then frame = pb_bytes(1, id) .. pb_uint(2, record.a) end
  add_frame(batch, record.w, frame .. pb_bytes(6, told))
  add_event(batch, state, record, nil, event)

  if record.s == 'A' then
    count(prefix, 'unplaced', -1)
  elseif record.s == 'P' then
    take_from_group(prefix, record)
  else
    redis.call('SREM', prefix .. ':running:' .. record.o, id)
    count(prefix, 'running', -1)
    if not by_owner then send_control(batch, instance_of(record.o), 'cancel', record) end
  end
  if record.g ~= '' then
    local _, meta = group_keys(prefix, record.g)
    if redis.call('HINCRBY', meta, 'live', -1) == 0 then
      redis.call('DEL', meta)
      redis.call('SREM', prefix .. ':groups', record.g)
    end
  end
  if record.x ~= '' then redis.call('ZREM', prefix .. ':expiry', id) end
  redis.call('XACK', prefix .. ':queue', CONSUMER_GROUP, id)  -- also one that was placed unread may be pending
  redis.call('XDEL', prefix .. ':queue', id)
  redis.call('DEL', record.k, progress_key)
  count_request(prefix, record, -1)
end

-- leases and arguments ----------------------------------------------------------------------------------------------------

local function lease_holds(prefix, role, token)
  return redis.call('GET', prefix .. ':lease:' .. role) == token
end

local LEASE_LOST = { err = 'QLMLEASE the lease expired or belongs to another' }
local NOT_FOUND = { err = 'QLMNOTFOUND no such request' }

-- Every function gets the bounds as its first arguments.
local BOUND_NAMES = { 'attempts_max', 'result_ttl_ms', 'frames_max', 'frames_ttl_ms', 'control_max', 'events_max' }

local function read_bounds(args)
  local bounds = {}
  for index, name in ipairs(BOUND_NAMES) do bounds[name] = args[index] end
  bounds.attempts_max = tonumber(bounds.attempts_max)
  return bounds, #BOUND_NAMES + 1
end
