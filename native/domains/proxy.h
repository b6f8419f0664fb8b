// The host's part of a round across domains: one proxy a rank and workspace, between its kernels' words and a network.
//
// A proxy posts what the kernels have put into network memory, and tells the kernels what has come. It knows the
// transport's table and the boards of its domain, nothing of CUDA, and touches no row: network memory may be a GPU's.
// docs/protocol/domains.md has the operations X0 to X10 and the proofs.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "protocol/domains/board.h"
#include "putget_transport.h"

namespace putget::proxy {

// All ranks agree on generation, workspace, epoch, shape and domains.
struct Config {
  uint32_t rank;
  uint32_t generation;  // of the group: another one after each change of the active ranks
  uint32_t workspace;
  uint32_t epoch;  // of the last round before
  uint64_t timeout_ns;
  ParcelShape shape;
  Domains domains;
  const putget_transport* transport;
  uint64_t* board[kMaxRanks];  // of the active ranks of the own domain
  uint32_t outbox;             // regions of the own memory, of the transport's add_region
  uint32_t returns;
  uint32_t inbox_of[kMaxRanks];  // targets of the transport: the agents' inboxes
  uint32_t return_inbox_of[kMaxRanks];
  // Whether it writes a byte to everybody before the first round. Where network memory is a GPU's, networks set up
  // streams and mappings with a first write, which may wait for kernels: here none waits for the network.
  bool warms_up = false;
};

// Why a proxy has stopped.
struct Fault {
  Lost reason = Lost::kNot;
  uint32_t epoch = 0;
  RankSet missing = RankSet::none();
};

// Counters of what a proxy has posted since it was made.
struct Posted {
  uint64_t writes = 0;  // immediates alone included
  uint64_t bytes = 0;
};

class Proxy {
 public:
  // Looks up the counters of all immediates; what they count from here on is this generation's. The ranks meet between
  // this and the first step of any of them. Throws std::runtime_error where the transport refuses.
  explicit Proxy(const Config& config);
  Proxy(const Proxy&) = delete;             // the network adds to words in it
  Proxy& operator=(const Proxy&) = delete;  // the network adds to words in it

  // Looks at every word once and does what can be done. Never blocks, allocates, locks or calls CUDA. Whether anything
  // has moved. One thread at a time.
  bool step(uint64_t now_ns);

  // Rounds can begin: nothing is written any more that is none of theirs. Any thread may ask.
  bool has_begun() const { return has_begun_.load(std::memory_order_acquire); }
  const Fault& fault() const { return fault_; }
  const Posted& posted() const { return posted_; }
  // No write is under way: the network adds to no word in here any more.
  bool quiet() const;
  // The peers of writes that are under way.
  RankSet unfinished() const;
  // Every round that the kernels have begun, and every message that has come, has ended: nobody waits for this proxy.
  // As for step, one thread at a time.
  bool resting() const;

 private:
  // An immediate's counter, and what it said when a round began to wait for it.
  struct Counter {
    const uint64_t* word = nullptr;
    uint64_t seen = 0;

    bool grown() const;
    void take() { ++seen; }
  };
  // Writes to one peer: how many were posted, and how many the network says are over.
  struct Lane {
    uint32_t peer = 0;
    uint32_t posted = 0;
    uint64_t over = 0;  // the network adds to it

    bool idle() const;
    bool failed() const;
  };
  // A message to the agent in one other domain, and its return.
  struct Sending {
    Lane lane;
    uint32_t domain = 0;
    uint32_t dispatched = 0;  // epoch of the last message that is posted
    uint32_t ended = 0;       // epoch of the last one that was answered
    uint32_t end_kind = 0;
    uint32_t rows = 0;
    uint32_t num_parcels = 0;
    uint32_t next = 0;  // parcel
    bool posting = false;
    uint32_t asked = 0;  // times that the agent was asked whether it lives
    uint64_t from = 0;   // bytes from the start of the outbox
    uint64_t to = 0;     // ... and of the agent's inbox
    uint64_t since_ns = 0;
    std::vector<Counter> returned;  // by parcel
    Counter released;
    std::vector<Counter> waiting;  // by rank
  };
  // Messages of a source that this rank is the agent of, and what goes back.
  struct Serving {
    Lane lane;
    uint32_t landed = 0;  // epoch
    uint32_t ended = 0;
    uint32_t rows = 0;
    uint32_t num_parcels = 0;
    uint32_t next = 0;
    bool posting = false;
    bool told = false;
    uint64_t from = 0;
    uint64_t to = 0;
    uint64_t since_ns = 0;
    std::vector<Counter> parcel;  // all but the last one of a message
    std::vector<Counter> last;
    Counter empty;
  };

  enum class Post { kDone, kLater, kStopped };

  Counter counter(ParcelKind kind, uint32_t parcel, uint32_t sender) const;
  void add_sending(uint32_t domain);
  void add_serving(uint32_t source);

  bool warm_up();
  Post post_byte(Lane& lane, uint32_t region, uint64_t from, uint32_t target, uint64_t to);
  bool step_sending(Sending& sending, uint64_t now_ns);
  bool begin_dispatch(Sending& sending, uint64_t now_ns);
  bool post_dispatch(Sending& sending);
  bool observe_return(Sending& sending);
  void ask_whether_the_agent_lives(Sending& sending, uint64_t now_ns);
  void hear_whom_the_agent_waits_for(Sending& sending, uint64_t now_ns);
  bool step_sent();
  bool step_serving(Serving& serving, uint64_t now_ns);
  bool observe_message(Serving& serving, uint64_t now_ns);
  bool begin_return(Serving& serving);
  bool post_return(Serving& serving);
  bool tell_whom_it_waits_for(Serving& serving, uint64_t now_ns);
  RankSet holding_up(uint32_t epoch) const;
  bool closed_by_all(uint32_t epoch);
  void step_beats(uint64_t now_ns);

  Post post(Lane& lane, putget_transport_write write);
  void check(const Lane& lane, uint32_t epoch);
  void stop(Lost reason, uint32_t epoch, const RankSet& missing);

  const Config config_;
  const Splits splits_;
  const Board board_;
  std::vector<std::unique_ptr<Sending>> sending_;
  std::vector<std::unique_ptr<Serving>> serving_;
  std::atomic<bool> has_begun_;
  uint32_t sent_;
  uint32_t closed_;  // the last round that all ranks of the domain have ended
  uint32_t closed_kind_ = 0;
  // The last beat of each proxy of the domain, by place, and when it came.
  uint64_t beat_[kMaxRanks] = {};
  uint64_t beat_ns_[kMaxRanks] = {};
  uint64_t beats_ = 0;
  uint64_t next_beat_ns_ = 0;
  Posted posted_;
  Fault fault_;
};

}  // namespace putget::proxy
