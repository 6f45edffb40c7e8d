-- Shared by all scripts. KEYS[1] is the queue's prefix "{<queue>}"; keys are described in keys.py.
-- The scripts write protobuf by hand: serialized messages are concatenated, and a later field overrides an earlier one.

local STATE_NUMBER = { C = 4, F = 5, X = 6, E = 7 }
local EVENT = { accepted = 1, pulled = 3, unpulled = 4, requeued = 5, C = 6, F = 7, X = 8, E = 9, moved = 14, unplaced = 17 }
local UNASSIGNED = 'unassigned'
local CONSUMER_GROUP = 'planner'
local BATCH_MAX = 500
local RECORD_BYTES = 768  -- as in bounds.py
local ERASED = 'erased'  -- in place of a result; without it a gateway would take its request for one that the server has lost

local function integer(number)
  return string.format('%.0f', number)
end

-- A double as a string that is read back as the same double.
local function seconds(number)
  return string.format('%.17g', number)
end

local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- protobuf -----------------------------------------------------------------------------------------------------------

-- Three bytes at a time and without a table: each step of each request writes some.
local function varint(number)
  if number < 128 then return string.char(number) end
  local first = number % 128
  number = (number - first) / 128
  if number < 128 then return string.char(first + 128, number) end
  local second = number % 128
  number = (number - second) / 128
  if number < 128 then return string.char(first + 128, second + 128, number) end
  local third = number % 128
  return string.char(first + 128, second + 128, third + 128) .. varint((number - third) / 128)
end

-- Tags of the fields of the messages that the scripts write: number * 8, and + 2 where bytes follow.
local UINT_TAG = { '\8', '\16', '\24', '\32', '\40', '\48', '\56', '\64', '\72' }
local BYTES_TAG = {
  '\10', '\18', '\26', '\34', '\42', '\50', '\58', '\66', '\74', '\82', '\90', '\98', '\106', '\114', '\122', '\130\1',
}

local function pb_uint(field, number)
  if number == 0 then return '' end
  return UINT_TAG[field] .. varint(number)
end

local function pb_bytes(field, value)
  if value == '' then return '' end
  return BYTES_TAG[field] .. varint(#value) .. value
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

-- Reads the tag of a field of a serialized message: its number and the position after the field, or nil where the message is cut.
local function read_field(bytes, position)
  local tag, value
  tag, position = read_varint(bytes, position)
  if not tag then return nil end
  local wire = tag % 8
  if wire == 0 then
    value, position = read_varint(bytes, position)
  elseif wire == 1 then
    position = position + 8
  elseif wire == 2 then
    value, position = read_varint(bytes, position)
    position = value and position + value
  elseif wire == 5 then
    position = position + 4
  else
    return nil
  end
  if not position or position > #bytes + 1 then return nil end
  return math.floor(tag / 8), position
end

-- Whether a serialized message has a field on its top level.
local function pb_has(bytes, field)
  local position = 1
  while position <= #bytes do
    local number
    number, position = read_field(bytes, position)
    if not number or number == field then return number ~= nil end
  end
  return false
end

-- Whether a serialized message is cut nowhere on its top level.
local function pb_is_whole(bytes)
  local position = 1
  while position and position <= #bytes do
    position = select(2, read_field(bytes, position))
  end
  return position ~= nil
end

-- `model` of a serialized Request: its first field.
local function model_of(body)
  if string.byte(body, 1) ~= 10 then return '' end
  local length, position = read_varint(body, 2)
  if not length or position + length - 1 > #body then return '' end
  return string.sub(body, position, position + length - 1)
end

-- requests -----------------------------------------------------------------------------------------------------------

-- State, attempts, failed attempts, first pull (ms), first output (ms), form of the output ('1': text; 'L': with logprobs) and owner of a
-- request's `s`, as strings.
local function state_parts(stored)
  return string.match(stored, '^(%u)(%d+) (%d+) (%d*) (%d*) ([1L]?) (.*)$')
end

-- The record of a live request, or nil. Its hash holds few, long fields, since each field of a write costs: `f` what never changes, `s`
-- what changes as it runs, `w` gateway, `g` group, `p` its last placement (ms after acceptance), `x` expiry, `b` bytes counted for it at its
-- acceptance. Times are milliseconds; those that may be '' are strings.
local function read_request(hash_key)
  local fields = redis.call('HMGET', hash_key, 'f', 's', 'w', 'g', 'x', 'b', 'p')
  if not fields[1] then return nil end
  local id, number, accepted_ms, prompt_tokens, class = string.match(fields[1], '^(%S+) (%d+) (%d+) (%d+) (.*)$', 17)
  local state, attempt, failed, started_ms, first_output_ms, form, owner = state_parts(fields[2])
  local placed = tonumber(fields[7] or '')
  return {
    key = hash_key, fixed = fields[1], stored_state = fields[2], gateway = fields[3], group = fields[4] or '',
    expiry_ms = fields[5] or '', digest = string.sub(fields[1], 1, 16), id = id, number = tonumber(number),
    accepted_ms = tonumber(accepted_ms), prompt_tokens = tonumber(prompt_tokens), class = class,
    state = state, attempt = tonumber(attempt), failed = tonumber(failed), started_ms = started_ms, first_output_ms = first_output_ms,
    form = form, owner = owner, bytes = tonumber(fields[6]) or 0,
    placed_ms = placed and accepted_ms and integer(accepted_ms + placed) or '',
  }
end

local function read_state(stored)
  local state, attempt, failed, started_ms, first_output_ms, form, owner = state_parts(stored)
  return {
    state = state, attempt = tonumber(attempt), failed = tonumber(failed), started_ms = started_ms, first_output_ms = first_output_ms,
    form = form, owner = owner,
  }
end

-- Reads the fields that return a request to its group, at half the cost of `read_request`: its table has no more than 16 fields, and
-- `states` keeps what the call has parsed, since those that were pulled together have mostly equal ones.
local function read_returnable(states, hash_key)
  local fields = redis.call('HMGET', hash_key, 'f', 's', 'g')
  if not fields[1] then return nil end
  local id, number, accepted_ms, prompt_tokens = string.match(fields[1], '^(%S+) (%d+) (%d+) (%d+) ', 17)
  local state = states[fields[2]] or read_state(fields[2])
  states[fields[2]] = state
  return {
    key = hash_key, stored_state = fields[2], group = fields[3] or '', id = id, number = tonumber(number),
    accepted_ms = tonumber(accepted_ms), prompt_tokens = tonumber(prompt_tokens), state = state.state, attempt = state.attempt,
    failed = state.failed, started_ms = state.started_ms, first_output_ms = state.first_output_ms, form = state.form, owner = state.owner,
  }
end

local function fixed_text(digest, id, number, accepted_ms, prompt_tokens, class)
  return digest .. id .. ' ' .. integer(number) .. ' ' .. integer(accepted_ms) .. ' ' .. prompt_tokens .. ' ' .. class
end

local NEW_STATE = 'A0 0    '

local function state_text(record)
  return record.state .. integer(record.attempt) .. ' ' .. integer(record.failed) .. ' ' .. record.started_ms .. ' '
    .. record.first_output_ms .. ' ' .. record.form .. ' ' .. record.owner
end

-- Body and hash key of an entry of the global queue.
local function entry_parts(entry)
  local fields = entry[2]
  if fields[1] == 'r' then return fields[2], fields[4] end
  return fields[4], fields[2]
end

-- Body and hash key of a queue id, or nil.
local function read_entry(prefix, id)
  local entries = redis.call('XRANGE', prefix .. ':queue', id, id)
  if #entries == 0 then return nil end
  return entry_parts(entries[1])
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

-- The stored end of a request, or nil (also where it was erased): state, attempts, produced bytes, queue id, incarnation, digest, Result.
local function read_terminal(prefix, hash_key)
  local stored = redis.call('GET', result_key_of(prefix, hash_key))
  if not stored or stored == ERASED then return nil end
  local attempts, produced, id, length, start = string.match(stored, '^(%d+) (%d+) (%S+) (%d+) ()', 18)
  local incarnation_end = start + tonumber(length)
  return {
    digest = string.sub(stored, 1, 16), state = string.sub(stored, 17, 17), attempts = tonumber(attempts),
    produced = tonumber(produced), id = id, incarnation = string.sub(stored, start, incarnation_end - 1),
    result = string.sub(stored, incarnation_end + 1),
  }
end

-- An answer of seven strings that LiveRequest is made of; with the progress, Pulled.
local function live_answer(record, body, progress)
  return { record.key, record.fixed, state_text(record), record.gateway, record.group, record.placed_ms, body, progress }
end

local function terminal_answer(record)
  return { record.state, record.digest, record.id, integer(record.attempts), record.result }
end

-- leases and arguments ----------------------------------------------------------------------------------------------------

local function lease_holds(prefix, role, token)
  return redis.call('GET', prefix .. ':lease:' .. role) == token
end

local LEASE_LOST = { err = 'QLMLEASE the lease expired or belongs to another' }
local NOT_FOUND = { err = 'QLMNOTFOUND no such request' }

-- Every function gets the bounds as its first arguments.
local BOUND_NAMES = { 'attempts_max', 'result_ttl_ms', 'frames_max', 'frames_ttl_ms', 'control_max', 'events_max', 'pulls_max' }

local function read_bounds(args)
  local bounds = {}
  for index, name in ipairs(BOUND_NAMES) do bounds[name] = args[index] end
  bounds.attempts_max, bounds.pulls_max = tonumber(bounds.attempts_max), tonumber(bounds.pulls_max)
  return bounds, #BOUND_NAMES + 1
end
