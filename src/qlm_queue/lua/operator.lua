-- live_requests: what operators call.

local PAGE_BYTES_MAX = 4194304  -- of bodies that one call reads; as in operator_values.py

-- Model and admission of a serialized Request, '' where it is cut: no prompt leaves the server by it.
local function without_prompt(body)
  local kept, position = {}, 1
  while position <= #body do
    local number, after = read_field(body, position)
    if not number then return '' end
    if number == 1 or number == 15 then kept[#kept + 1] = string.sub(body, position, after - 1) end
    position = after
  end
  return table.concat(kept)
end

-- args: after ('' from the start), page size; answer: the id to go on after ('' at the end), live records without their prompts
local function live_requests(keys, args)
  local prefix = keys[1]
  local _, at = read_bounds(args)
  local stream, from, answer, bytes = prefix .. ':queue', args[at] == '' and '-' or '(' .. args[at], { '' }, 0
  for _ = 1, tonumber(args[at + 1]) do
    local entry = redis.call('XRANGE', stream, from, '+', 'COUNT', 1)[1]
    if not entry then return answer end
    local body, hash_key = entry_parts(entry)
    local record = read_request(hash_key)
    if record then answer[#answer + 1] = live_answer(record, without_prompt(body)) end
    from, bytes = '(' .. entry[1], bytes + #body
    if bytes >= PAGE_BYTES_MAX then break end
  end
  answer[1] = string.sub(from, 2)
  return answer
end
