-- regroup: waiting requests go from one group to another.

local ALIKE = { 'model', 'slo_kind' }

-- Whether requests of a group may wait in another one: `pull` goes by the model of a group, and a deadline means what its kind says.
local function is_alike(prefix, source, group, args)
  local _, source_meta = group_keys(prefix, source)
  local _, meta = group_keys(prefix, group.gid)
  local given = {}
  for at = group.first, group.first + group.strings - 1, 2 do given[args[at]] = args[at + 1] end
  local from, into = redis.call('HMGET', source_meta, unpack(ALIKE)), redis.call('HMGET', meta, unpack(ALIKE))
  local is_there = redis.call('EXISTS', meta) == 1
  for index, name in ipairs(ALIKE) do
    if (from[index] or '') ~= (given[name] or '') or (is_there and from[index] ~= into[index]) then return false end
  end
  return true
end

-- args: lease token, gid that they wait in, the group that they go to (gid, instance, before, first deadline, last deadline, least SLO,
--       number of meta strings, meta field and value…), requests (queue id, hash key)…; answer: a status a request
local function regroup(keys, args)
  local prefix = keys[1]
  local bounds, at = read_bounds(args)
  if not lease_holds(prefix, 'planner', args[at]) then return LEASE_LOST end
  local source, group = args[at + 1], group_at(args, at + 2)
  local batch = open_batch(prefix, bounds)
  local alike, ids, tokens, statuses = is_alike(prefix, source, group, args), {}, 0, {}
  for index = group.first + group.strings, #args, 2 do
    local id, hash_key = args[index], args[index + 1]
    local record = read_request(hash_key)
    local waits = record and record.id == id and record.state == 'P'
    local status = 'stale'
    if waits and record.group == group.gid then
      status = 'done'
    elseif waits and record.group == source and alike then
      status = 'done'
      if not group.is_open then place_first(batch, args, group) end
      record.group = group.gid
      join_group(batch, group.gid, record)
      redis.call('HSET', hash_key, 'g', group.gid)
      ids[#ids + 1] = id
      tokens = tokens + record.prompt_tokens
    end
    statuses[#statuses + 1] = status
  end
  if #ids > 0 then
    local changes, left = changes_of(batch, group.gid), changes_of(batch, source)
    changes.live, left.live = changes.live + #ids, left.live - #ids
    local _, instance = place_of(prefix, source)
    local is_head = redis.call('LINDEX', prefix .. ':vq:' .. instance, 0) == source
    take_from_group(prefix, source, ids, tokens)
    if is_head and place_of(prefix, source) == '' and instance ~= UNASSIGNED then send_control(batch, instance, 'head') end
  end
  close_batch(batch)
  return statuses
end
