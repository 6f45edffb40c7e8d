-- The write that WAIT has to follow.

-- Writes without changing anything, also on a full server: replicas that have this write have all that the server did before it. Some
-- servers take WAIT for done where its connection wrote nothing.
-- answer: acceptances so far
local function mark(keys)
  return redis.call('INCRBY', keys[1] .. ':acceptance', 0)
end
