-- apply_plan: how a plan is written.

local function versions_answer(prefix, names, applied, moved)
  local answer = { applied, moved }
  if #names == 0 then return answer end
  for index, version in ipairs(redis.call('HMGET', prefix .. ':vq_version', unpack(names))) do
    answer[#answer + 1] = names[index]
    answer[#answer + 1] = version or '0'
  end
  return answer
end

local LREM_MAX = 16  -- each walks over the list

local function write_list(key, gids)
  redis.call('DEL', key)
  for first = 1, #gids, 1000 do
    redis.call('RPUSH', key, unpack(gids, first, math.min(first + 999, #gids)))
  end
end

-- Puts a segment on its queue. `where`: the queue of each group that the call names, as far as the call has read; `lists` may still hold
-- groups that moved to another queue since, so that only the queue that a segment is put on is written anew.
local function put_segment(lists, where, segment)
  for _, gid in ipairs(segment.gids) do where[gid] = false end
  local order, kept, name = {}, 0, segment.name
  local function put()
    for _, gid in ipairs(segment.gids) do
      order[#order + 1] = gid
      where[gid] = name
    end
  end
  if segment.start == 0 then put() end
  for _, gid in ipairs(lists[name]) do
    if where[gid] == nil or (where[gid] == name and not segment.named[gid]) then
      order[#order + 1] = gid
      kept = kept + 1
      if kept == segment.start then put() end
    end
  end
  if kept < segment.start then put() end
  lists[name] = order
end

-- The final order of a queue, and whether it differs from the one before.
local function settled_list(list, before, where, name)
  local found, changed = {}, false
  for _, gid in ipairs(list) do
    if where[gid] == nil or where[gid] == name then
      found[#found + 1] = gid
      if before[#found] ~= gid then changed = true end
    end
  end
  return found, changed or #found ~= #before
end

-- Takes groups off a queue that none are put on; answers whether it has another head then. A few are taken out one by one: a plan takes
-- some from every queue with each call, and writing all of them anew costs more than all else.
local function take_away(list, gids)
  local head, gone = redis.call('LINDEX', list, 0), {}
  for _, gid in ipairs(gids) do gone[gid] = true end
  if #gids <= LREM_MAX then
    for _, gid in ipairs(gids) do redis.call('LREM', list, 1, gid) end
  else
    local left = {}
    for _, gid in ipairs(redis.call('LRANGE', list, 0, -1)) do
      if not gone[gid] then left[#left + 1] = gid end
    end
    write_list(list, left)
  end
  return gone[head] == true
end

-- args: lease token, plan version, number of queues, (instance, version)…, number of segments, (instance, start, size, gid…)…
-- answer: applied, groups moved, (instance, version)…
local function apply_plan(keys, args)
  local prefix = keys[1]
  local bounds, at = read_bounds(args)
  if not lease_holds(prefix, 'planner', args[at]) then return LEASE_LOST end
  local plan_version, queue_count = tonumber(args[at + 1]), tonumber(args[at + 2])
  at = at + 3
  local names, wanted = {}, {}
  for index = 1, queue_count do
    names[index], wanted[index] = args[at], tonumber(args[at + 1])
    at = at + 2
  end
  local versions = #names == 0 and {} or redis.call('HMGET', prefix .. ':vq_version', unpack(names))
  local applies = plan_version >= tonumber(redis.call('GET', prefix .. ':plan_version') or '0')
  for index, version in ipairs(versions) do
    versions[index] = tonumber(version or '0')
    if versions[index] ~= wanted[index] then applies = false end
  end
  if not applies then return versions_answer(prefix, names, '0', '0') end

  local segments, ids = {}, {}
  local segment_count = tonumber(args[at])
  at = at + 1
  for index = 1, segment_count do
    local size = tonumber(args[at + 2])
    segments[index] = { name = args[at], start = tonumber(args[at + 1]), gids = { unpack(args, at + 3, at + 2 + size) }, named = {} }
    for _, gid in ipairs(segments[index].gids) do ids[#ids + 1] = gid end
    at = at + 3 + size
  end
  local number = {}
  for index, name in ipairs(names) do number[name] = index end
  local where, origin, queue_of = {}, {}, {}
  for index, stored in ipairs(#ids == 0 and {} or redis.call('HMGET', prefix .. ':groups', unpack(ids))) do
    local name = stored and queue_of[stored]
    if name == nil and stored then  -- hundreds of groups are on a few queues
      name = on_queue(stored) or false
      queue_of[stored] = name
      if name and not number[name] then applies = false end  -- it is open on a queue that the call does not name
    end
    if name then where[ids[index]], origin[ids[index]] = name, name end
  end
  local before, lists = {}, {}
  for _, segment in ipairs(segments) do
    local name = segment.name
    if not lists[name] then
      if not number[name] or not serves(prefix, name) then applies = false end
      before[name] = redis.call('LRANGE', prefix .. ':vq:' .. name, 0, -1)
      lists[name] = before[name]
    end
    local open = {}
    for _, gid in ipairs(segment.gids) do
      if where[gid] then
        open[#open + 1] = gid
        segment.named[gid] = true
      end
    end
    segment.gids = open
  end
  if not applies then return versions_answer(prefix, names, '0', '0') end

  for _, segment in ipairs(segments) do put_segment(lists, where, segment) end

  local batch = open_batch(prefix, bounds)
  local moved, leaving = {}, {}
  for _, segment in ipairs(segments) do
    local name, arrived = segment.name, {}
    local place = ON .. name
    for _, gid in ipairs(segment.gids) do
      local from = origin[gid]
      if from ~= name then
        arrived[#arrived + 1] = gid
        moved[#moved + 1] = gid
        moved[#moved + 1] = place
        if not lists[from] then
          leaving[from] = leaving[from] or {}
          leaving[from][#leaving[from] + 1] = gid
        end
      end
    end
    if #arrived > 0 then add_moved_event(batch, name, arrived) end
  end
  if #moved > 0 then redis.call('HSET', prefix .. ':groups', unpack(moved)) end
  local grown = {}
  for index, name in ipairs(names) do
    local changed, head = leaving[name] ~= nil, false
    if changed then
      head = take_away(prefix .. ':vq:' .. name, leaving[name])
    elseif lists[name] then
      local list
      list, changed = settled_list(lists[name], before[name], where, name)
      if changed then write_list(prefix .. ':vq:' .. name, list) end
      head = list[1] ~= before[name][1]
    end
    if changed then
      grown[#grown + 1] = name
      grown[#grown + 1] = integer(versions[index] + 1)
      if head and name ~= UNASSIGNED then send_control(batch, name, 'head') end
    end
  end
  if #grown > 0 then redis.call('HSET', prefix .. ':vq_version', unpack(grown)) end
  redis.call('SET', prefix .. ':plan_version', integer(plan_version))
  close_batch(batch)
  return versions_answer(prefix, names, '1', integer(#moved / 2))
end
