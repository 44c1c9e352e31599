# TriKV's wire: the only contract between processes. These comments are the reference documentation.
#
# Transport: Cap'n Proto two-party RPC on a unix socket (mode 0600, same uid) or on TCP. The bootstrap
# capability is `Kv`. Expected errors are values (`Error` in a union); an RPC exception means a bug or a
# lost connection. Every list and blob has a bound, named beside it; a message over 8 MiB is refused.
#
# Evolution: fields, methods and union members are added at the end, never renumbered, retyped or reused.
# `protocolVersion` grows when meaning changes; a daemon of version N serves clients of N-1, N and N+1.
#
# Blobs: `hashes` is the block hashes one after another, `hashBytes` bytes each (16 or 32), in prefix order;
# `blocks` is the engine's block ids as little-endian int32. One blob a message: no object per block.
#
# Who calls what:
#   scheduler of an engine   hello, declare, query, release, heartbeat
#   worker (one a rank)      hello, register, save, load, heartbeat
#   tools                    status

@0xf3b8a7c4d15e6092;

const protocolVersion :UInt16 = 1;

struct Error {
  # An expected failure. To an engine every code means "not cached": it computes and goes on.
  code @0 :Text;
  # Stable name: bad-request, unsupported-version, forbidden, not-ready (instance not complete yet: try
  # again), conflict (another live process holds this name), overloaded (a stated limit is reached),
  # lease-lost (query again), engine-lost, shutting-down, internal.
  message @1 :Text;
  # One line for a person; names the setting to change where there is one.
}

interface Kv @0xa1d7c05b9e34f218 {
  # What a daemon offers to everyone who can open its socket.

  hello @0 (hello :Hello) -> (reply :HelloReply);
  # Opens a session. Must come first for everything but `status`.

  status @1 () -> (status :Status);
  # Facts for people and tools; cheap; needs no session.
}

struct Hello {
  protocol @0 :UInt16;    # the caller's `protocolVersion`
  software @1 :Text;      # for logs, e.g. "trikv 0.1.0, vllm 0.32.0"; at most 256 bytes
}

struct HelloReply {
  union {
    error @0 :Error;      # unsupported-version names both versions
    ok :group {
      protocol @1 :UInt16;
      software @2 :Text;
      epoch @3 :UInt64;             # differs after each start of the daemon
      heartbeatSeconds @4 :Float32; # silence longer than this ends the session
      session @5 :Session;
    }
  }
}

interface Session @0xb7e20f6d4c8a9135 {
  # Holding it is being alive. When it is dropped, the connection breaks, or no call arrives for
  # `heartbeatSeconds`, its copies are drained, its memory is forgotten and its leases end. Blocks stay.

  declare @0 (instance :Instance) -> (reply :DeclareReply);
  # By the scheduler: names the engine and everything that its bytes depend on.

  register @1 (rank :Rank) -> (reply :RegisterReply);
  # By a worker: where its part of every block lies. The memory must stay mapped while the session lives.
  # An instance is ready, and its namespace known, when it is declared and all its ranks are registered.

  query @2 (query :Query) -> (reply :QueryReply);
  # How many leading blocks are at hand, with a lease on exactly these. Asking again for the same request
  # renews or replaces its lease.

  save @3 (save :Save) -> (reply :SaveReply);
  # Copies blocks from the rank's memory. Answered when no byte of them will be read any more.

  load @4 (load :Load) -> (reply :LoadReply);
  # Copies leased blocks into the rank's memory. Answered when no byte will be written any more: a block
  # reported as failed is never written after the reply.

  release @5 (requests :List(Text)) -> ();
  # These requests have ended (at most 4,096 a call): their leases end, their chains are forgotten.

  heartbeat @6 () -> ();

  reset @7 (altered :Text) -> (reply :ResetReply);
  # Forgets every block of the instance's namespace, for all engines that share it. `altered` (at most
  # 64 bytes): the instance's weights are no more those that its fields name, so from now on they have
  # one more, of this name and value. It declares that by itself when it declares itself again.
}

struct Field { name @0 :Text; value @1 :Text; }

struct Instance {
  name @0 :Text;          # unique per running engine, the same in all its processes; 1 to 256 bytes
  rankCount @1 :UInt16;   # workers that hold a part of every block (tensor x pipeline parallel); 1 to 64
  fields @2 :List(Field);
  # Everything that the bytes of a block depend on and that is not in `Rank`: model config digest, weights
  # identity, dtypes, block size, into how many shards a block is split, hash algorithm, a probe hash, tenant salt. At most 128
  # fields of 64 + 4,096 bytes, names unique. The namespace is a fingerprint of these and of the geometry
  # of all pages of a block; nothing is interpreted but two names: `label` (what people call it; not part of the
  # fingerprint) and `hash_probe` (engines equal in all but this are told that they hash differently).
}

struct DeclareReply {
  union {
    error @0 :Error;
    ok :group {
      namespace @1 :Text;           # 32 hex digits, or empty while ranks are missing
      notes @2 :List(Text);         # what the operator should know, one line each
    }
  }
}

struct Memory {
  # One registered range of the rank's memory.
  union {
    process :group {                # the calling process's own memory (unix socket only)
      address @0 :UInt64;
      bytes @1 :UInt64;
    }
    cudaIpc :group {                # one CUDA allocation; refused by a daemon without CUDA
      handle @2 :Data;              # the raw 64-byte handle of the whole allocation
      allocationBytes @3 :UInt64;   # at most 1 TiB
      deviceUuid @4 :Data;          # 16 bytes, as the driver gives it; one GPU a rank
    }
  }
}

struct Piece {
  # A contiguous run: piece of block b = memory[memory] + offset + b * stride, `bytes` long.
  memory @0 :UInt16;
  offset @1 :UInt64;
  stride @2 :UInt64;
  bytes @3 :UInt32;
}

struct Rank {
  instance @0 :Text;
  rank @1 :UInt16;
  memories @2 :List(Memory);        # 1 to 4,096, of one kind, shared by all groups
  groups @3 :List(Group);           # 1 to 16
  fences @4 :Fences;
  events @5 :List(Data);
  # GPU memory: raw 64-byte handles of CUDA events, at most 256. A save or load that names one is
  # ordered after the work that the engine had queued when it last recorded that event.
  signals @6 :Signals;
}

struct Signals {
  # GPU memory: an array of uint32 words in one of the rank's memories, in which loads show their end.
  memory @0 :UInt16;
  offset @1 :UInt64;                # a multiple of 4
  count @2 :UInt16;                 # 0: this rank has none; at most 256
}

struct Group {
  # One cache group: blocks are keyed per group.
  blockCount @0 :UInt32;            # engine blocks: ids run from 0 to blockCount - 1
  pieces @1 :List(Piece);           # 1 to 65,536 over all groups, in page order: a page is the pieces one after another
  layout @2 :Text;                  # element type and order inside a piece, e.g. "float32/BHNC"; <= 256 bytes
  replicas @3 :UInt16 = 1;
  # So many ranks in a row (0 to n - 1, n to 2n - 1, ...) hold the same bytes of every block, as all ranks
  # of a model with MLA do. Such ranks share one page: it is stored once, they take turns in saving blocks,
  # and each loads all of them. The same on all ranks, a divisor of `rankCount`; the pieces of such ranks have
  # equal bytes and layout. The fingerprint knows pages, not ranks: engines with the same pages share them,
  # with however many ranks they hold each.
  sections @4 :List(UInt64);
  # Where in a page each of its sections ends, in bytes: rising, the last at the page's end; at most 8. An
  # `ordered` load moves them one after another. Empty: one. No part of the fingerprint.
}

struct Fences {
  # An array of uint64 generation words in the caller's process memory. A save names one word and the
  # generation it saw; raising the word makes that save void. So an engine can reuse blocks at once, even
  # while the daemon is frozen: the daemon looks at the word after copying and before anything is visible.
  address @0 :UInt64;
  count @1 :UInt32;                 # 0: this rank uses no fences; at most 65,536
}

struct RegisterReply {
  union {
    error @0 :Error;
    ok :group {
      namespace @1 :Text;
      pageBytes @2 :List(UInt64);   # a group: bytes of this rank's page of a block
      notes @3 :List(Text);
      writers @4 :List(Int32);
      # Processes besides the daemon's that write the rank's memory: it is left alone for certain
      # only when these have ended too. When one ends, the daemon ends the session.
    }
  }
}

struct Query {
  request @0 :Text;                 # the engine's request id; 1 to 512 bytes
  group @1 :UInt16;
  hashBytes @2 :UInt8;
  hashes @3 :Data;                  # the whole prompt's full blocks, from its first token; at most 65,536
  waitSeconds @4 :Float32;
  # Answer when the blocks that are coming are there, when waiting pays no more, or after this time, at
  # most 60; 0: at once. Others are served meanwhile; a call that waits is a call in flight.
  alone @5 :Bool;
  # The engine computes nothing: it will load what is found at once, and its first bytes may come near its
  # memory before that.
}

struct QueryReply {
  union {
    error @0 :Error;
    ok :group {
      hitCount @1 :UInt32;          # leading blocks that can be loaded now
      lease @2 :UInt64;             # 0 when hitCount is 0
      leaseSeconds @3 :Float32;     # from now; renewed by asking again
      comingCount @4 :UInt32;       # blocks behind these that are on their way from a disk: ask again,
                                    # with `waitSeconds`; no promise
      comingSeconds @5 :Float32;    # an estimate of how long they take
    }
  }
}

struct Save {
  rank @0 :UInt16;
  group @1 :UInt16;
  request @2 :Text;
  first @3 :UInt32;                 # position in the request of the first of these blocks
  hashBytes @4 :UInt8;
  hashes @5 :Data;                  # at most 65,536
  blocks @6 :Data;
  fence @7 :UInt32;                 # index into `Fences`; ignored when the rank has none
  generation @8 :UInt64;
  event @9 :UInt16;                 # 1 + index into `Rank.events`; 0: the blocks are complete now
  signal @10 :UInt16;               # 1 + index into the rank's words, which becomes `value` behind the
  value @11 :UInt32;                # last byte that is read; 0: none. Only if no copy of it fails
  altered @12 :Text;                # if it is there: what the field `altered` of the instance was, empty
                                    # if none, when these blocks were computed. Another one now, by a
                                    # `reset`: the save is refused, however late it comes
}

struct SaveReply {
  union {
    error @0 :Error;
    ok :group {
      # With `Group.replicas` only blocks that are this rank's to save; else all of them.
      savedCount @1 :UInt32;        # copied now
      presentCount @2 :UInt32;      # were there, or on their way, already
      refusedCount @3 :UInt32;      # no room, fence raised, or memory gone
    }
  }
}

struct Load {
  rank @0 :UInt16;
  lease @1 :UInt64;
  first @2 :UInt32;                 # position of the first block inside the lease
  blocks @3 :Data;                  # where the blocks go; at most 65,536
  budgetSeconds @4 :Float32;        # blocks not begun by then are reported as failed; 0: no limit
  event @5 :UInt16;                 # 1 + index into `Rank.events`; 0: the blocks may be written now
  signal @6 :UInt16;                # 1 + index into `Rank.signals`; 0: none
  value @7 :UInt32;                 # what that word becomes once all blocks have arrived: after their last
                                    # byte in the order of the GPU, before the reply. A load that fails in
                                    # part never makes it that.
  ordered @8 :Bool;                 # section after section (`Group.sections`) of all blocks. Of n sections,
                                    # number s (from 0) is there when the word has become value - n + 1 + s,
                                    # cyclically. A daemon that does not know this makes it `value` at the end.
}

struct LoadReply {
  union {
    error @0 :Error;                # nothing was written, nothing will be
    ok :group {
      failed @1 :Data;              # positions in `blocks` (little-endian int32) that did not arrive
    }
  }
}

struct ResetReply {
  union {
    error @0 :Error;
    ok :group { droppedCount @1 :UInt64; }
  }
}

struct Counter { name @0 :Text; value @1 :UInt64; }

struct Status {
  software @0 :Text;
  epoch @1 :UInt64;
  uptimeSeconds @2 :Float64;
  state @3 :Text;                   # serving, draining, or degraded: why
  pool @4 :PoolStatus;
  namespaces @5 :List(NamespaceStatus);
  engines @6 :List(EngineStatus);
  counters @7 :List(Counter);       # monotonic since start; names as in docs/metrics.md
  stallSeconds @8 :Float32;         # longest processor time of the main thread between two turns of its loop
  copiers @9 :List(CopierStatus);   # one a GPU that an engine has registered
  windows @10 :List(WindowStatus);  # what engines asked for of late; each window of everyone, then of the
                                    # few busiest namespaces
  calls @11 :List(CallCount);       # calls of this interface that have ended
  http @12 :Text;                   # URL under which /metrics lies; empty: there is no HTTP
  curve @13 :List(CurvePoint);      # by capacity; empty before the first query. Old queries fade by the hour
  shadows @14 :List(ShadowStatus);  # what each order of eviction would have given, on a sample
  tenants @15 :List(TenantStatus);  # with quotas: those that have blocks
  disks @16 :List(DiskStatus);      # with SSDs: all that were set
  cluster @17 :ClusterStatus;       # with other hosts
}

struct WindowStatus {
  # Rolls: covers between 11/12 of its length and all of it. Blocks are counted once a request, however
  # often it asks. docs/metrics.md says what the three ratios mean.
  seconds @0 :Float64;              # its length
  coveredSeconds @1 :Float64;       # how much of that has passed since counting began
  namespace @2 :Text;               # fingerprint; empty: everyone
  askedBlocks @3 :UInt64;
  hits @4 :List(TierHits);
  distinctBlocks @5 :UInt64;        # estimate, of the blocks asked for
  missedDistinctBlocks @6 :UInt64;  # estimate, of those that were not at hand
  hitRatio @7 :Float64;             # measured
  reachableRatio @8 :Float64;       # 1 - missedDistinctBlocks / askedBlocks
  freshRatio @9 :Float64;           # 1 - distinctBlocks / askedBlocks
  case @10 :Text;                   # idle, low-ceiling, far-below, at-ceiling
}

struct TierHits { tier @0 :Text; blocks @1 :UInt64; }

struct CallCount {
  method @0 :Text;
  outcome @1 :Text;                 # ok, the code of the error, or broken: the caller had gone
  count @2 :UInt64;
}

struct TenantStatus {
  name @0 :Text;
  usedBytes @1 :UInt64;             # pages of its sealed blocks
  floorBytes @2 :UInt64;            # what others' needs leave it
  shareBytes @3 :UInt64;            # with more it gives first
  ssdUsedBytes @4 :UInt64;          # the same on the disks below the pool, all together
  ssdFloorBytes @5 :UInt64;
  ssdShareBytes @6 :UInt64;
}

struct DiskStatus {
  path @0 :Text;
  ring @1 :Text;                    # what carries out its operations
  state @2 :Text;                   # serving, scanning or off; then a colon and what a person should know
  capacityBytes @3 :UInt64;
  usedBytes @4 :UInt64;             # slots of blocks that can be read
  blockCount @5 :UInt64;
  foundCount @6 :UInt64;            # blocks that were there at the start
  writtenBytes @7 :UInt64;          # since the start
  readBytes @8 :UInt64;
  wrongCount @9 :UInt64;            # blocks that could not be read, or were not what was written
  errorCount @10 :UInt64;           # operations that failed
  waitingCount @11 :UInt64;         # requests whose blocks wait to be written, to any disk
}

struct CurvePoint {
  # Measured on a sample of blocks by the distance between their uses; within 0.02 of replay.
  capacityBytes @0 :UInt64;
  hitRate @1 :Float32;
}

struct ShadowStatus { policy @0 :Text; hitRate @1 :Float32; }

struct CopierStatus {
  deviceUuid @0 :Text;              # 32 hex digits
  name @1 :Text;                    # of the GPU; empty until it is open
  pid @2 :Int32;                    # 0: none runs
  state @3 :Text;                   # why the last one ended, until a new one has mapped a rank
  endedCount @4 :UInt64;            # how often one has ended since the daemon's start
  registeredBytes @5 :UInt64;       # of the pool, once all of it is registered with the GPU
  saveSeconds @6 :Float64;          # of this copier, from the arrival of each copy to its end, summed;
                                    # with the time that a load's first bytes took before that
  loadSeconds @7 :Float64;
}

struct PoolStatus {
  capacityBytes @0 :UInt64;
  usedBytes @1 :UInt64;             # pages of sealed and filling blocks
  pinnedBytes @2 :UInt64;
  slabBytes @3 :UInt64;
  slabCount @4 :UInt32;
  slabFreeCount @5 :UInt32;
  blockCount @6 :UInt64;
  fillingCount @7 :UInt64;
  leaseCount @8 :UInt64;
  backing @9 :Text;                 # hugetlb, huge pages on request, or 4 KiB pages; and where
  notice @10 :Text;                 # what could make it faster, or nothing
}

struct NamespaceStatus {
  fingerprint @0 :Text;
  label @1 :Text;
  blockCount @2 :UInt64;
  bytes @3 :UInt64;
  engineCount @4 :UInt32;
  fields @5 :List(Field);
}

struct EngineStatus {
  name @0 :Text;
  namespace @1 :Text;
  rankCount @2 :UInt16;
  ranksRegistered @3 :UInt16;
  pids @4 :List(Int32);
  state @5 :Text;                   # ready, or what is missing
  pageCounts @6 :List(UInt16);
  # A group: pages of a block. Less than `rankCount` where ranks hold the same bytes; empty until ready.
}

# -- Between nodes
#
# A node is one daemon, named by the address at which others reach it, and its epoch. A connection from
# one node to another, or to a metaserver, begins with a proof on both sides that they know the cluster
# secret; before that no call is answered but `hello`. The one who dialled proves first.
#
#   proof = HMAC-SHA256(secret, "trikv proof 1" 0 who
#                       length role length address length nonce      of the one who dialled
#                       length role length address length nonce)     of the other
#
# where `who` is "dialer" or "listener", lengths are little-endian uint32, and roles, addresses and nonces
# are those of the two greetings. It says who speaks; it encrypts nothing.
#
# `origin` is what a block hash is unique in, everywhere: 16 bytes fingerprint of the namespace, and the
# cache group as a little-endian uint32.

struct Greeting {
  protocol @0 :UInt16;
  software @1 :Text;                # for logs; at most 256 bytes
  role @2 :Text;                    # node, meta or tool; at most 64 bytes
  address @3 :Text;                 # host:port at which it is reached; empty for a tool; at most 256 bytes
  nonce @4 :Data;                   # 32 random bytes, fresh for this connection
}

struct Challenge {
  union {
    error @0 :Error;
    ok :group {
      greeting @1 :Greeting;        # the listener's
      needsProof @2 :Bool;          # false: this listener has no secret, and takes any proof
    }
  }
}

interface Meta @0x9c1e5b7a20d4f836 {
  # A metaserver: knows which node holds which block. Its answers are hints: a wrong one costs a miss.

  hello @0 (greeting :Greeting) -> (reply :Challenge);

  prove @1 (proof :Data) -> (reply :MetaReply);
  # Once a connection: after a wrong proof it is closed, as it is without one within 5 seconds.
}

struct MetaReply {
  union {
    error @0 :Error;                # forbidden: another secret
    ok :group {
      proof @1 :Data;               # the listener's; empty when it has no secret
      epoch @2 :UInt64;             # differs after each start: all must be announced anew
      session @3 :MetaSession;
      silenceSeconds @4 :Float32;   # a node that says nothing for so long is forgotten
    }
  }
}

interface MetaSession @0xd5a90e3c7b182f64 {
  # Of one connection. All but `join` and `status` are for nodes that have joined, and show that the node
  # lives. When the connection is lost the node has a second or two to come back before it is forgotten.

  join @0 (epoch :UInt64, rails :List(Text)) -> (reply :JoinReply);
  # By the address of the greeting. `rails` name the networks that the node's NICs are on: at most 16 names
  # of at most 64 bytes; owners with a common one are preferred. An older epoch of the same address is
  # forgotten at once; a younger one makes this call fail as conflict.

  begin @1 () -> (reply :DoneReply);
  # Everything will be announced anew. What was announced before counts until `finish`. At most 64 nodes do
  # so at once; others are refused as overloaded, and ask again.

  announce @2 (adverts :List(Advert)) -> (reply :AnnounceReply);
  # At most 64 adverts with 8,192 hashes together. Repeating one is fine.

  finish @3 () -> (reply :DoneReply);
  # All that is held has been announced: what was not is not held. Both sides count the digest from here.

  locate @4 (origin :Data, hashBytes :UInt8, hashes :Data) -> (reply :LocateReply);
  # Where to fetch these blocks, at most 16,384, in prefix order; never from the asker itself.

  heartbeat @5 (lentBlocks :UInt32) -> (reply :BeatReply);
  # `lentBlocks`: blocks that this node is sending to others now.

  leave @6 () -> ();
  # The node ends: it is forgotten at once.

  status @7 () -> (status :MetaStatus);
}

struct JoinReply {
  union {
    error @0 :Error;
    ok :group {
      isComplete @1 :Bool;          # all was announced in this epoch; the next heartbeat's digest says
                                    # whether all changes since have arrived
    }
  }
}

struct DoneReply {
  union {
    error @0 :Error;
    ok @1 :Void;
  }
}

struct Advert {
  origin @0 :Data;
  isHeld @1 :Bool;                  # false: no longer held
  hashBytes @2 :UInt8;
  hashes @3 :Data;
  isBelow @4 :Bool;                 # held on a disk only: named where nobody has the block in memory
}

struct AnnounceReply {
  union {
    error @0 :Error;
    ok :group {
      declinedCount @1 :UInt32;     # not remembered: the index is full
      crowdedCount @2 :UInt32;      # not remembered: 8 nodes own the block already
    }
  }
}

struct LocateReply {
  union {
    error @0 :Error;
    ok :group {
      owners @1 :List(Owner);
      segments @2 :Data;
      # Of three little-endian int32 each: index into `owners`, first block, count. They cover the blocks
      # from the first one on without a gap, as far as others hold them; at most 64.
    }
  }
}

struct Owner { address @0 :Text; epoch @1 :UInt64; }

struct BeatReply {
  union {
    error @0 :Error;
    ok :group {
      digest @1 :UInt64;
      # Sum over what the node has told since it last finished an announcement, held minus no longer held;
      # when the node's own differs, something was lost: announce all anew.
      nodeCount @2 :UInt32;         # nodes that have announced everything
      nodesDigest @3 :UInt64;       # of their names: two metaservers with the same one know the same
      declinedCount @4 :UInt64;     # of this node's adverts, since `begin`
      freeCount @5 :UInt64;         # entries that are not used
    }
  }
}

struct MetaStatus {
  software @0 :Text;
  epoch @1 :UInt64;
  uptimeSeconds @2 :Float64;
  state @3 :Text;                   # serving, or full: adverts are declined
  nodes @4 :List(NodeStatus);
  entryCount @5 :UInt64;            # blocks that are known
  capacity @6 :UInt64;              # at most
  memoryBytes @7 :UInt64;           # of the index, when all entries are used
  originCount @8 :UInt64;
  counters @9 :List(Counter);
  calls @10 :List(CallCount);
  stallSeconds @11 :Float32;
  http @12 :Text;
  isOpen @13 :Bool;                 # no secret is asked for
}

struct NodeStatus {
  address @0 :Text;
  epoch @1 :UInt64;
  heldCount @2 :UInt64;             # blocks that it is remembered as an owner of
  isComplete @3 :Bool;
  lentBlocks @4 :UInt64;
  declinedCount @5 :UInt64;
  crowdedCount @6 :UInt64;
}

interface Peer @0xe2b60d94f71c385b {
  # What a node offers to other nodes at its routable address. Nothing of the pool can be read without the
  # proof, and only what a grant covers with it.

  hello @0 (greeting :Greeting) -> (reply :Challenge);

  prove @1 (proof :Data) -> (reply :PeerReply);
  # Once a connection: after a wrong proof it is closed, as it is without one within 5 seconds.
}

struct PeerReply {
  union {
    error @0 :Error;                # forbidden: another secret, or no node
    ok :group {
      proof @1 :Data;               # the listener's; empty when it has no secret
      epoch @2 :UInt64;             # of the node
      session @3 :PeerSession;
      dataPort @4 :UInt16;          # where bytes come from over TCP, at the same host
      railCount @5 :UInt16;         # NICs for RDMA; 0: none
    }
  }
}

interface PeerSession @0x8f3d27ac5e60b914 {
  # Of one connection. When it is lost all its grants are over: the owner ends every way by which this peer
  # reads, and only then reuses the pages.

  lend @0 (loan :Loan) -> (reply :LendReply);
  # Blocks that stay where they are until `release`, or for the seconds that the reply names.

  release @1 (grant :UInt64, wantsSums :Bool) -> (reply :ReleaseReply);
  # The caller reads no more under a grant, and asks whether what it has read may be believed. It may only
  # when the answer says so. Who has read over TCP asks for sums, and compares them.

  connect @2 (offer :Data) -> (reply :ConnectReply);
  # Joins queue pairs of the caller; see core/rails.py. Needed before reading by RDMA.
}

struct Loan {
  origin @0 :Data;
  hashBytes @1 :UInt8;
  hashes @2 :Data;                  # 1 to 4,096
  seconds @3 :Float32;              # wanted; more than 0
  wantsSums @4 :Bool;               # `release` will ask for the sums: they are made meanwhile
}

struct LendReply {
  union {
    error @0 :Error;                # overloaded: as much is lent as may be
    ok :group {
      grant @1 :UInt64;             # 0: none of the blocks is here
      seconds @2 :Float32;          # from when the call was sent, at least
      pageBytes @3 :List(UInt64);   # of each rank
      offsets @4 :Data;
      # Little-endian int64, rank by rank: where each block's page begins in the pool; -1: it is not lent.
      token @5 :Data;               # by which data streams are told what they may send; 16 bytes
    }
  }
}

struct ReleaseReply {
  union {
    error @0 :Error;
    ok :group {
      wasValid @1 :Bool;            # all blocks were where they are said to be, all the time
      sums @2 :Data;                # XXH3-64 of each lent block, little-endian uint64; a block's pages by rank
    }
  }
}

struct ConnectReply {
  union {
    error @0 :Error;
    ok :group {
      answer @1 :Data;
    }
  }
}

struct PeerStatus {
  # Another node with which this one has dealt.
  address @0 :Text;
  state @1 :Text;                   # serving, not dialled, or why it is left alone
  way @2 :Text;                     # by which bytes came last: rdma or tcp
  fetchedBytes @3 :UInt64;
  fetchedBlocks @4 :UInt64;
  failedBlocks @5 :UInt64;          # were to be fetched from there, and were not
  lentBytes @6 :UInt64;             # since the start
  grantCount @7 :UInt32;            # that it holds now
  rdmaBytes @8 :UInt64;             # that came by RDMA, and by TCP: more than was fetched when
  tcpBytes @9 :UInt64;              # some of it was not believed
}

struct ClusterStatus {
  # What a daemon with metaservers knows of other hosts.
  address @0 :Text;                 # this node's; empty: it has no metaservers
  peers @1 :List(PeerStatus);
  metas @2 :List(MetaLineStatus);
  grantCount @3 :UInt32;            # that others hold on this node's blocks now
  grantedBytes @4 :UInt64;
  fetchCount @5 :UInt32;            # fetches under way
  isOpen @6 :Bool;                  # no secret is asked for
  railCount @7 :UInt32;
  unfencedBytes @8 :UInt64;         # of the pool, that a NIC may write at any time: never used again
  liftedBytes @9 :UInt64;           # of the pool: read from SSDs for others, or being read, and not over
  liftedLentBytes @10 :UInt64;      # lent to others after they were read from SSDs for them, since the start
}

struct MetaLineStatus {
  address @0 :Text;
  state @1 :Text;                   # joined, or why not
  nodeCount @2 :UInt32;             # that it knows
  waitingBlocks @3 :UInt64;         # changes that it has not been told
  announcedCount @4 :UInt64;        # times that everything was announced
}
