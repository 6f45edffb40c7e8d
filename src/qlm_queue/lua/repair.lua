-- repair_keys, repair_requests, repair_groups, repair_members, repair_counts, condemn: how damaged records are found and set aside.
-- The stream and the hash of a request say what it is. All else (members of groups, virtual queues, sets of what runs, counters) follows
-- from them and is made again. Each call is one step on the queue as it is then, so that repairs may run beside everything else, and twice.

local TYPES = {
  queue = 'stream', req = 'hash', result = 'string', progress = 'string', logprobs = 'string', group = 'zset', group_meta = 'hash',
  groups = 'hash', vq = 'list', vq_version = 'hash', running = 'set', lease = 'string', fence = 'string', address = 'hash',
  instances = 'hash', registered = 'hash', incarnations = 'set', frames = 'stream', ctl = 'stream', events = 'stream',
  acceptance = 'string', expiry = 'zset', kept = 'zset', counts = 'hash', plan_version = 'string', profiles = 'hash',
  paused = 'hash', version = 'string', waits = 'string', damage_count = 'string',
}
local COUNTERS = { acceptance = true, fence = true, plan_version = true, version = true, damage_count = true }
local ASIDE_TTL_MS = 7 * 24 * 3600 * 1000
local NO_DIGEST = '\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0'

-- Every repair begins with: '1' to mend or '' to report only, and the Result of requests whose record is lost.
local function open_repair(keys, args)
  local bounds, at = read_bounds(args)
  return { prefix = keys[1], fix = args[at] == '1', failure = args[at + 1], report = {}, batch = open_batch(keys[1], bounds) }, at + 2
end

-- Notes a finding: the key, what is wrong and what becomes of it. Answers whether it is to be mended.
local function found(repair, key, problem, remedy)
  local report = repair.report
  report[#report + 1], report[#report + 2], report[#report + 3] = key, problem, remedy
  return repair.fix
end

local function close_repair(repair)
  close_batch(repair.batch)
  if repair.fix and #repair.report > 0 then redis.call('INCRBY', repair.prefix .. ':damage_count', #repair.report / 3) end
  return repair.report
end

local function set_aside(repair, name, problem)
  if found(repair, name, problem, 'set aside') then
    local aside = repair.prefix .. ':damaged:' .. string.sub(name, #repair.prefix + 2)
    redis.call('RENAME', name, aside)
    redis.call('PEXPIRE', aside, ASIDE_TTL_MS)
  end
end

local function pairs_of(key)
  local flat, map = redis.call('HGETALL', key), {}
  for index = 1, #flat, 2 do map[flat[index]] = flat[index + 1] end
  return map
end

local function is_number(text)
  local number = tonumber(text)
  return number ~= nil and number == number
end

-- requests -------------------------------------------------------------------------------------------------------------

-- The record of the request of a hash, or nil and what is wrong with it.
local function whole_record(hash_key)
  local fields = redis.pcall('HMGET', hash_key, 'f', 's', 'w', 'x')
  if fields.err then return nil, 'is of another type' end
  if not fields[1] then return nil, 'is missing' end
  if not string.match(fields[1], '^%d+%-%d+ %d+ %d+ %d+ ', 17) then return nil, 'has no fixed part' end
  local state, _, _, _, _, _, owner = state_parts(fields[2] or '')
  if not state or not string.find('APR', state, 1, true) or (state == 'R') ~= (instance_of(owner) ~= nil) then
    return nil, 'has no state'
  end
  if not fields[3] or (fields[4] and not is_number(fields[4])) then return nil, 'lacks a field' end
  return read_request(hash_key)
end

-- The end of a request whose record is lost.
local function remnant(hash_key, id)
  local gateway, group = redis.pcall('HGET', hash_key, 'w'), redis.pcall('HGET', hash_key, 'g')
  return {
    key = hash_key, id = id, number = 0, accepted_ms = tonumber(string.match(id, '^%d+')), prompt_tokens = 0, class = '',
    digest = NO_DIGEST, gateway = type(gateway) == 'string' and gateway or '', group = type(group) == 'string' and group or '',
    state = 'L', attempt = 0, failed = 0, owner = '', started_ms = '', first_output_ms = '', form = '1', expiry_ms = '0',
    bytes = 0,
  }
end

local function group_is_whole(repair, gid)
  local known = repair.whole_groups
  if not known then
    known = {}
    repair.whole_groups = known
  end
  if known[gid] == nil then
    local _, meta = group_keys(repair.prefix, gid)
    local names = { 'live', 'prompt_tokens', 'first_deadline', 'slo_least', 'last_deadline', 'slo_s', 'priority', 'band' }
    local fields = redis.pcall('HMGET', meta, 'model', unpack(names))
    local whole = not fields.err and fields[1] and fields[1] ~= ''
      and redis.call('HEXISTS', repair.prefix .. ':groups', gid) == 1
    for index = 1, whole and #names or 0 do
      local value = fields[index + 1]
      whole = whole and (is_number(value) or (index > 4 and not value))
    end
    known[gid] = whole
  end
  return known[gid]
end

local function fail_damaged(repair, record, body, problem)
  if found(repair, record.key, problem, 'failed') then
    redis.call('DEL', repair.prefix .. ':progress:' .. record.id, repair.prefix .. ':logprobs:' .. record.id)
    record.form = '1'
    if record.state ~= 'R' then record.state = 'L' end  -- where it was listed, it is found later
    if record.group ~= '' and not group_is_whole(repair, record.group) then record.group = '' end
    finish(repair.batch, record, 'F', repair.failure, body or '', '', '', '', false)
  end
end

-- Where a request stands that waits or runs, against its group and its owner.
local function repair_place(repair, record)
  local prefix, id, gid = repair.prefix, record.id, record.group
  local members = group_keys(prefix, gid)
  if record.state == 'A' then
    local reached = repair.delivered and not is_after(id, repair.delivered)
    if reached and #redis.pcall('XPENDING', prefix .. ':queue', CONSUMER_GROUP, id, id, 1) == 0
      and found(repair, record.key, 'waits for no planner', 'placed again') then
      await_placement(prefix, id)
    end
  elseif gid == '' or not group_is_whole(repair, gid) then
    if record.state == 'P' then
      if found(repair, record.key, 'is of a group without a record', 'placed again') then unplace(repair.batch, record) end
    elseif gid ~= '' and found(repair, record.key, 'is of a group without a record', 'placed again later') then
      redis.call('HDEL', record.key, 'g')
    end
  elseif record.state == 'P' then
    if tonumber(redis.pcall('ZSCORE', members, id) or nil) ~= record.number
      and found(repair, record.key, 'is not in its group', 'placed again') then
      redis.call('ZADD', members, record.number, id)
    end
  end
  if record.state == 'R' and redis.pcall('SISMEMBER', prefix .. ':running:' .. record.owner, id) ~= 1
    and found(repair, record.key, 'is not among what its owner runs', 'placed again') then
    if gid ~= '' and not group_is_whole(repair, gid) then record.group = '' end
    return_to_group(repair.batch, record, 'head', false)
    add_event(repair.batch, 'requeued', record, 'lost', first_output(record))
  end
end

local function repair_request(repair, id, body, hash_key)
  local prefix = repair.prefix
  if not hash_key or not string.match(hash_key, '^:req:[^:]*:[^:]*$', #prefix + 1) or string.sub(hash_key, 1, #prefix) ~= prefix then
    if found(repair, prefix .. ':queue/' .. id, 'names no request', 'dropped') then
      local batch = repair.batch
      batch.settled[#batch.settled + 1], batch.ended[#batch.ended + 1] = id, id
    end
    return
  end
  local record, problem = whole_record(hash_key)
  if not record then
    local done, ended = pcall(read_terminal, prefix, hash_key)
    if done and ended and ended.id == id then  -- a step that ended it was cut short
      if found(repair, hash_key, 'has ended', 'dropped') then
        local batch = repair.batch
        batch.settled[#batch.settled + 1], batch.ended[#batch.ended + 1] = id, id
      end
    else
      fail_damaged(repair, remnant(hash_key, id), body, problem)
    end
    return
  elseif record.id ~= id then
    fail_damaged(repair, remnant(hash_key, id), body, 'is of another request')
    return
  end
  repair.number = math.max(repair.number, record.number)
  if model_of(body) == '' or not pb_is_whole(body) then
    fail_damaged(repair, record, body, 'has a body that cannot be read')
    return
  end
  if record.first_output_ms ~= '' then
    local length = redis.pcall('STRLEN', prefix .. ':progress:' .. id)
    if type(length) ~= 'number' or length == 0 or (record.form ~= '1' and length % 4 ~= 0) then
      fail_damaged(repair, record, body, 'has lost output that was shown')
      return
    end
  end
  if record.bytes ~= RECORD_BYTES + #body and found(repair, record.key, 'is counted with other bytes', 'restored') then
    redis.call('HSET', record.key, 'b', RECORD_BYTES + #body)
  end
  if record.expiry_ms ~= '' and tonumber(redis.pcall('ZSCORE', prefix .. ':expiry', id) or nil) ~= tonumber(record.expiry_ms)
    and found(repair, record.key, 'is not in the index of expiries', 'restored') then
    redis.call('ZADD', prefix .. ':expiry', record.expiry_ms, id)
  end
  repair_place(repair, record)
end

-- args: mend, Result, after ('' from the start), count; answer: the id to go on after ('' at the end), the highest acceptance number, then
-- (key, problem, remedy)…
local function repair_requests(keys, args)
  local repair, at = open_repair(keys, args)
  local queue = repair.prefix .. ':queue'
  repair.number, repair.delivered = 0, nil
  if not redis.pcall('XINFO', 'GROUPS', queue).err then repair.delivered = last_delivered(queue) end
  local entries = redis.pcall('XRANGE', queue, args[at] == '' and '-' or '(' .. args[at], '+', 'COUNT', args[at + 1])
  local last = ''
  for _, entry in ipairs(entries.err and {} or entries) do
    last = entry[1]
    local fields = {}
    for index = 1, #entry[2], 2 do fields[entry[2][index]] = entry[2][index + 1] end
    repair_request(repair, last, fields['r'] or '', fields['k'])
  end
  return { last, integer(repair.number), unpack(close_repair(repair)) }
end

-- args: mend, Result, queue id…; answer: (key, problem, remedy)…. Ends requests that no process of this version can read.
local function condemn(keys, args)
  local repair, at = open_repair(keys, args)
  for index = at, #args do
    local body, hash_key = read_entry(repair.prefix, args[index])
    local record = body and whole_record(hash_key)
    if record and record.id == args[index] and found(repair, hash_key, 'has a body that cannot be read', 'failed') then
      finish(repair.batch, record, 'F', repair.failure, body, nil, '', '', false)
    end
  end
  return close_repair(repair)
end

-- keys -----------------------------------------------------------------------------------------------------------------

local function id_is_live(prefix, id)
  return string.match(id, '^%d+%-%d+$') ~= nil and read_entry(prefix, id) ~= nil
end

-- Kinds of keys that follow from others, or that are read whole.
local CHECKS
CHECKS = {
  req = function(repair, name)
    local record = whole_record(name)
    local _, hash_key = read_entry(repair.prefix, record and record.id or '0-0')
    if hash_key ~= name then  -- and no entry is its own: those were checked first
      fail_damaged(repair, record and not hash_key and record or remnant(name, '0-0'), '', 'has lost its body')
    end
  end,
  result = function(repair, name)
    local done, ended = pcall(read_terminal, repair.prefix, repair.prefix .. ':req:' .. string.sub(name, #repair.prefix + 9))
    if not done or (ended and not pb_is_whole(ended.result)) then set_aside(repair, name, 'cannot be read') end
  end,
  lease = function(repair, name, role)
    local fence = string.match(redis.call('GET', name), '^(%d+):.+$')
    local counter = repair.prefix .. ':fence:' .. (instance_of(role) or role)
    if not fence then
      set_aside(repair, name, 'is no lease')
    elseif (tonumber(redis.pcall('GET', counter) or 0) or 0) < tonumber(fence) and found(repair, counter, 'is behind a lease', 'restored') then
      redis.call('SET', counter, integer(now_ms()))
    end
  end,
  progress = function(repair, name, id)
    if not id_is_live(repair.prefix, id) and found(repair, name, 'is of no live request', 'dropped') then redis.call('DEL', name) end
  end,
  vq = function(repair, name, instance)
    if redis.call('HEXISTS', repair.prefix .. ':vq_version', instance) == 0 and found(repair, name, 'has no version', 'restored') then
      redis.call('HSET', repair.prefix .. ':vq_version', instance, integer(now_ms()))
    end
  end,
  vq_version = function(repair, name)
    for instance, version in pairs(pairs_of(name)) do
      if not string.match(version, '^%d+$') and found(repair, name, 'has no version of ' .. instance, 'restored') then
        redis.call('HSET', name, instance, integer(now_ms()))
      end
    end
  end,
  running = function(repair, name, incarnation)
    local incarnations = repair.prefix .. ':incarnations'
    if redis.call('SISMEMBER', incarnations, incarnation) == 0 and found(repair, name, 'is of an unknown incarnation', 'restored') then
      redis.call('SADD', incarnations, incarnation)
    end
  end,
  group_meta = function(repair, name, gid)
    local groups = repair.prefix .. ':groups'
    if redis.call('HEXISTS', groups, gid) == 0 and found(repair, name, 'is a group of no place', 'restored') then
      redis.call('HSET', groups, gid, DRAINED .. UNASSIGNED)
    end
  end,
  expiry = function(repair, name)
    for _, id in ipairs(redis.call('ZRANGE', name, 0, BATCH_MAX - 1)) do
      if not id_is_live(repair.prefix, id) and found(repair, name, 'has ' .. id .. ', which is not live', 'dropped') then
        redis.call('ZREM', name, id)
      end
    end
  end,
  registered = function(repair, name)
    for instance, incarnation in pairs(pairs_of(name)) do
      CHECKS.vq(repair, repair.prefix .. ':vq:' .. instance, instance)
      local body = redis.pcall('HGET', repair.prefix .. ':instances', instance)
      if (type(body) ~= 'string' or not pb_is_whole(body) or instance_of(incarnation) ~= instance)
        and found(repair, name, instance .. ' has no record', 'registers again') then
        redis.call('HDEL', name, instance)
      elseif redis.call('EXISTS', repair.prefix .. ':lease:' .. incarnation) == 1 then
        CHECKS.running(repair, repair.prefix .. ':running:' .. incarnation, incarnation)
      end
    end
  end,
  profiles = function(repair, name)
    local version, body = unpack(redis.call('HMGET', name, 'version', 'body'))
    if not version or not string.match(version, '^%d+$') or not body or not pb_is_whole(body) then
      set_aside(repair, name, 'cannot be read')
    end
  end,
  waits = function(repair, name)
    if not pb_is_whole(redis.call('GET', name)) then set_aside(repair, name, 'cannot be read') end
  end,
}
CHECKS.logprobs, CHECKS.group = CHECKS.progress, CHECKS.group_meta

-- args: mend, Result, key…; answer: (key, problem, remedy)…. Keys without a rest come before those with one, and those of requests after
-- `repair_requests`.
local function repair_keys(keys, args)
  local repair, at = open_repair(keys, args)
  local readable = {}
  for index = at, #args do
    local name = args[index]
    local kind, rest = string.match(name, '^:([^:]*):?(.*)$', #repair.prefix + 1)
    local is, expected = redis.call('TYPE', name).ok, TYPES[kind]
    if not expected or is == 'none' then
      -- set aside before, or gone by now
    elseif is ~= expected then
      set_aside(repair, name, 'is a ' .. is)
    elseif COUNTERS[kind] and not string.match(redis.call('GET', name), '^%d+$') then
      set_aside(repair, name, 'is no number')
    elseif CHECKS[kind] then
      readable[#readable + 1] = { CHECKS[kind], name, rest }
    end
    -- A counted number is never given twice: it distinguishes incarnations and leases.
    if kind == 'fence' and repair.fix and redis.call('EXISTS', name) == 0 then redis.call('SET', name, integer(now_ms())) end
  end
  for _, check in ipairs(readable) do check[1](repair, check[2], check[3]) end
  return close_repair(repair)
end

-- args: mend, Result, (member of `kept` or '', key of a result or '')…: one whose result may be gone, or a result that may not be counted;
-- answer: (key, problem, remedy)…. A result that is counted again has no class, since it does not hold it.
local function repair_kept(keys, args)
  local repair, at = open_repair(keys, args)
  local prefix, batch, key = repair.prefix, repair.batch, repair.prefix .. ':kept'
  for index = at, #args, 2 do
    local member, name = args[index], args[index + 1]
    if member ~= '' then
      local bytes, tenant, request_id, class = kept_parts(member)
      if not (bytes and redis.call('EXISTS', prefix .. ':result:' .. tenant .. ':' .. request_id) == 1)
        and found(repair, key, 'has what is no result', 'dropped') and redis.call('ZREM', key, member) == 1 and bytes then
        count_bytes(batch, tenant, class, -bytes)
      end
    else
      local named = string.sub(name, #prefix + 9)
      local tenant, ttl_ms = string.match(named, '^([^:]*):'), redis.pcall('PTTL', name)
      local hash_key = prefix .. ':req:' .. named
      local done, ended = pcall(read_terminal, prefix, hash_key)
      -- A request that lives beside its result is one whose end was cut short: it ends again, and is counted then.
      if done and ended and tenant and ttl_ms > 0 and redis.call('EXISTS', hash_key) == 0 and found(repair, name, 'is not counted', 'counted') then
        local bytes = RECORD_BYTES + #ended.result
        redis.call('ZADD', key, integer(now_ms() + ttl_ms), kept_member(bytes, ended.id, named, ''))
        count_bytes(batch, tenant, '', bytes)
      end
    end
  end
  return close_repair(repair)
end

-- groups and virtual queues ----------------------------------------------------------------------------------------------

-- args: mend, Result; answer: (key, problem, remedy)…
local function repair_groups(keys, args)
  local repair = open_repair(keys, args)
  local prefix = repair.prefix
  local groups, versions = pairs_of(prefix .. ':groups'), pairs_of(prefix .. ':vq_version')
  versions[UNASSIGNED] = versions[UNASSIGNED] or '0'
  local names, lists, listed, changed = {}, {}, {}, {}
  for name in pairs(versions) do names[#names + 1] = name end
  table.sort(names)
  for _, name in ipairs(names) do
    lists[name] = {}
    local served, first = serves(prefix, name), #repair.report
    for _, gid in ipairs(redis.call('LRANGE', prefix .. ':vq:' .. name, 0, -1)) do
      if served and not listed[gid] and groups[gid] and group_is_whole(repair, gid) and redis.call('EXISTS', (group_keys(prefix, gid))) == 1 then
        lists[name][#lists[name] + 1] = gid
        listed[gid] = name
      else
        found(repair, prefix .. ':vq:' .. name, 'has ' .. gid .. ', which does not belong there', 'dropped')
      end
    end
    changed[name] = #repair.report > first
    if not served and found(repair, prefix .. ':vq:' .. name, 'is of no instance', 'dropped') then
      redis.call('HDEL', prefix .. ':vq_version', name)
      redis.call('DEL', prefix .. ':vq:' .. name)
      lists[name] = nil
    end
  end
  local gids = {}
  for gid in pairs(groups) do gids[#gids + 1] = gid end
  table.sort(gids)
  for _, gid in ipairs(gids) do
    local members, meta = group_keys(prefix, gid)
    local name, where = listed[gid], string.sub(groups[gid], 2)
    if not group_is_whole(repair, gid) then
      if found(repair, meta, 'cannot be read', 'its requests are placed again') then
        redis.call('DEL', meta, members)
        redis.call('HDEL', prefix .. ':groups', gid)
      end
    else
      if redis.call('EXISTS', members) == 1 and not name then
        name = lists[where] and serves(prefix, where) and where or UNASSIGNED
        lists[name][#lists[name] + 1] = gid
        changed[name] = true
        found(repair, prefix .. ':group:' .. gid, 'is on no virtual queue', 'put on ' .. name)
      end
      local place = name and ON .. name or DRAINED .. (serves(prefix, where) and where or UNASSIGNED)
      if place ~= groups[gid] and found(repair, prefix .. ':group:' .. gid, 'is not where it is said to be', 'restored') then
        redis.call('HSET', prefix .. ':groups', gid, place)
      end
    end
  end
  for _, name in ipairs(names) do
    if repair.fix and changed[name] and lists[name] then
      write_list(prefix .. ':vq:' .. name, lists[name])
      redis.call('HSET', prefix .. ':vq_version', name, integer((tonumber(versions[name]) or now_ms()) + 1))
      if name ~= UNASSIGNED then send_control(repair.batch, name, 'head') end
    end
  end
  return close_repair(repair)
end

-- args: mend, Result, gid, after (acceptance number); answer: the number to go on after ('' at the end), then (key, problem, remedy)…
local function repair_members(keys, args)
  local repair, at = open_repair(keys, args)
  local members = group_keys(repair.prefix, args[at])
  local listed = redis.call('ZRANGEBYSCORE', members, '(' .. args[at + 1], '+inf', 'WITHSCORES', 'LIMIT', 0, BATCH_MAX)
  for index = 1, #listed, 2 do
    local id, number = listed[index], tonumber(listed[index + 1])
    local record = string.match(id, '^%d+%-%d+$') and read_by_id(repair.prefix, id)
    if not (record and record.id == id and record.state == 'P' and record.group == args[at] and record.number == number)
      and found(repair, members, 'has ' .. id .. ', which does not wait there', 'dropped') then
      redis.call('ZREM', members, id)
    end
  end
  return { #listed == 2 * BATCH_MAX and listed[#listed] or '', unpack(close_repair(repair)) }
end

-- counters ---------------------------------------------------------------------------------------------------------------

-- The right values of the counters. It goes through all requests in one step, which stops the server for some microseconds each: only where
-- something was found.
local function counted(prefix)
  local counts, groups, after = { live = 0, unplaced = 0, running = 0, b = 0 }, {}, '-'
  local function add(map, name, by) map[name] = (map[name] or 0) + by end
  local function add_bytes(tenant, class, by)
    add(counts, 'b', by)
    add(counts, 'bt:' .. tenant, by)
    add(counts, 'bc:' .. class, by)
  end
  local kept, first = prefix .. ':kept', 0
  while true do
    local members = redis.call('ZRANGE', kept, first, first + BATCH_MAX - 1)
    for _, member in ipairs(members) do
      local bytes, tenant, _, class = kept_parts(member)
      if bytes then add_bytes(tenant, class, bytes) end
    end
    if #members < BATCH_MAX then break end
    first = first + BATCH_MAX
  end
  while true do
    local entries = redis.call('XRANGE', prefix .. ':queue', after, '+', 'COUNT', BATCH_MAX)
    for _, entry in ipairs(entries) do
      local record = read_by_id(prefix, entry[1])
      after = '(' .. entry[1]
      if record then
        counts.live = counts.live + 1
        if record.state == 'A' then add(counts, 'unplaced', 1) elseif record.state == 'R' then add(counts, 'running', 1) end
        add(counts, 't:' .. escaped_tenant(prefix, record.key), 1)
        add(counts, 'c:' .. record.class, 1)
        local output = record.first_output_ms == '' and 0
          or redis.call('STRLEN', prefix .. ':progress:' .. record.id) + redis.call('STRLEN', prefix .. ':logprobs:' .. record.id)
        add_bytes(escaped_tenant(prefix, record.key), record.class, record.bytes + output)
        if record.group ~= '' then
          local group = groups[record.group] or { live = 0, prompt_tokens = 0 }
          groups[record.group] = group
          group.live = group.live + 1
          if record.state == 'P' then group.prompt_tokens = group.prompt_tokens + record.prompt_tokens end
        end
      end
    end
    if #entries < BATCH_MAX then return counts, groups end
  end
end

-- args: mend, Result, '1' where something was found, highest acceptance number; answer: (key, problem, remedy)…
local function repair_counts(keys, args)
  local repair, at = open_repair(keys, args)
  local prefix = repair.prefix
  local key, stored = prefix .. ':counts', pairs_of(prefix .. ':counts')
  for _, incarnation in ipairs(redis.call('SMEMBERS', prefix .. ':incarnations')) do
    local running = prefix .. ':running:' .. incarnation
    for _, id in ipairs(redis.call('SMEMBERS', running)) do
      local record = string.match(id, '^%d+%-%d+$') and read_by_id(prefix, id)
      if not (record and record.state == 'R' and record.owner == incarnation)
        and found(repair, running, 'has ' .. id .. ', which does not run there', 'dropped') then
        redis.call('SREM', running, id)
      end
    end
  end
  if tonumber(redis.call('GET', prefix .. ':acceptance') or 0) < tonumber(args[at + 1])
    and found(repair, prefix .. ':acceptance', 'is behind what was accepted', 'restored') then
    redis.call('SET', prefix .. ':acceptance', args[at + 1])
  end
  local sums, live, bytes = { t = 0, c = 0, bt = 0, bc = 0 }, redis.call('XLEN', prefix .. ':queue'), tonumber(stored.b or 0)
  for field, value in pairs(stored) do
    local kind = string.match(field, '^(%l+):')
    if sums[kind or ''] then sums[kind] = sums[kind] + (tonumber(value) or 0) end
  end
  local fits = tonumber(stored.live or 0) == live and sums.t == live and sums.c == live and sums.bt == bytes and sums.bc == bytes
  if (fits and args[at] ~= '1') or not repair.fix then
    if not fits then found(repair, key, 'does not count what is there', 'counted again') end
    return close_repair(repair)
  end
  local counts, groups = counted(prefix)
  local fields, whole = {}, fits
  for field, number in pairs(counts) do
    if (tonumber(stored[field]) or 0) ~= number then whole = false end
    if number ~= 0 then fields[#fields + 1], fields[#fields + 2] = field, integer(number) end
  end
  if not whole then
    found(repair, key, 'does not count what is there', 'counted again')
    redis.call('DEL', key)
    for first = 1, #fields, BATCH_MAX do redis.call('HSET', key, unpack(fields, first, math.min(first + BATCH_MAX - 1, #fields))) end
  end
  for gid in pairs(pairs_of(prefix .. ':groups')) do
    local members, meta = group_keys(prefix, gid)
    local group = groups[gid]
    if not group then
      found(repair, meta, 'is of no live request', 'dropped')
      redis.call('DEL', meta, members)
      redis.call('HDEL', prefix .. ':groups', gid)
    elseif redis.call('HGET', meta, 'live') ~= integer(group.live) or redis.call('HGET', meta, 'prompt_tokens') ~= integer(group.prompt_tokens) then
      found(repair, meta, 'does not count what is there', 'counted again')
      redis.call('HSET', meta, 'live', integer(group.live), 'prompt_tokens', integer(group.prompt_tokens))
    end
  end
  return close_repair(repair)
end
