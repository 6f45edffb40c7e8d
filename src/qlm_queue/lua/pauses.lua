-- pause, resume, and what `pull` does about what is paused: it gives nothing of it, and takes it out of the way.

local HELD_BACK_MAX = 100  -- requests of paused tenants that one pull takes out of its way

-- args: 'm:<model>' or 't:<escaped tenant>', most pauses; answer: 1 if it is new, 0 if not, -1 where there are that many
local function pause(keys, args)
  local key = keys[1] .. ':paused'
  local _, at = read_bounds(args)
  if redis.call('HEXISTS', key, args[at]) == 1 then return 0 end
  if redis.call('HLEN', key) >= tonumber(args[at + 1]) then return -1 end
  redis.call('HSET', key, args[at], integer(now_ms()))
  return 1
end

-- args: as in `pause`; answer: 1 if it was paused
local function resume(keys, args)
  local _, at = read_bounds(args)
  return redis.call('HDEL', keys[1] .. ':paused', args[at])
end

-- The paused names, as a set, or nil.
local function read_pauses(prefix)
  local names = redis.call('HKEYS', prefix .. ':paused')
  if #names == 0 then return nil end
  local paused = {}
  for _, name in ipairs(names) do paused[name] = true end
  return paused
end

local function tenant_is_paused(paused, prefix, hash_key)
  return paused and paused['t:' .. escaped_tenant(prefix, hash_key)]
end

-- Takes a waiting request of a paused tenant out of its group, which others may share: it waits to be placed again.
local function hold_back(batch, record)
  take_from_group(batch.prefix, record.group, { record.id }, record.prompt_tokens)
  local changes = changes_of(batch, record.group)
  changes.live = changes.live - 1
  add_event(batch, 'unplaced', record, nil, first_output(record))
  unplace(batch, record)
end

-- Takes the first group off a virtual queue to those that no instance can serve now.
local function leave_unassigned(batch, instance, gid)
  local prefix = batch.prefix
  redis.call('LPOP', prefix .. ':vq:' .. instance)
  redis.call('RPUSH', prefix .. ':vq:' .. UNASSIGNED, gid)
  redis.call('HSET', prefix .. ':groups', gid, ON .. UNASSIGNED)
  redis.call('HINCRBY', prefix .. ':vq_version', instance, 1)
  redis.call('HINCRBY', prefix .. ':vq_version', UNASSIGNED, 1)
  add_moved_event(batch, UNASSIGNED, { gid })
end

-- Takes what is paused away from the head of a virtual queue, so that nobody waits for it there: groups of paused models, and the first
-- requests of the head as far as their tenants are paused. `room.held_back`: how many of these may still go.
local function clear_head(batch, room, instance)
  local prefix = batch.prefix
  local list = prefix .. ':vq:' .. instance
  for _ = 1, BATCH_MAX do
    local gid = redis.call('LINDEX', list, 0)
    if not gid then return end
    local members, meta = group_keys(prefix, gid)
    if room.paused['m:' .. (redis.call('HGET', meta, 'model') or '')] then
      leave_unassigned(batch, instance, gid)
    else
      local first = redis.call('ZRANGE', members, 0, 0)
      local _, hash_key = read_entry(prefix, first[1])
      if room.held_back == 0 or not tenant_is_paused(room.paused, prefix, hash_key) then return end
      hold_back(batch, read_request(hash_key))
      room.held_back = room.held_back - 1
    end
  end
end
