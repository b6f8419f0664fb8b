// A network in virtual time, for tests and simulations: fills the transport's table for many ends in one thread.
//
// It keeps the table's promises and nothing beyond them. Writes to one peer pass each other, bytes of one write land in
// pieces in any order, the source is read late and again, and a lost try lands in part and comes again.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <queue>
#include <random>
#include <string>
#include <vector>

#include "putget_transport.h"

namespace putget::proxy {

constexpr uint64_t kNever = ~uint64_t{0};

struct NetworkModel {
  uint64_t latency_ns = 0;      // from a byte's leaving to its arrival
  double bytes_per_ns = 1e9;    // of each end, out and in
  uint64_t write_ns = 0;        // of an end's NIC, for each write
  uint64_t post_ns = 0;         // of an end's host thread, for each write, while its NIC sends others
  uint64_t jitter_ns = 0;       // a piece is late by up to so much
  uint32_t pieces = 1;          // a write lands in up to so many
  uint32_t lost_permille = 0;   // of tries, which land in part and come again ...
  uint64_t again_ns = 0;        // ... after so long
  uint64_t over_ns = 0;         // from the last byte's arrival until the sender knows
  uint64_t down_ns = 0;         // until a write to an end that is gone fails
  uint32_t most_pending = ~0u;  // to one peer
  uint64_t most_bytes = uint64_t{1} << 30;
  bool moves_bytes = true;  // otherwise memory is not touched, and regions may start at null
  uint64_t seed = 1;
};

// Bytes that are about to land.
struct Arrival {
  uint32_t end;  // the memory's owner
  uint32_t region;
  uint64_t offset;
  uint64_t bytes;
  uint32_t imm;
};

class VirtualNetwork {
 public:
  VirtualNetwork(const NetworkModel& model, uint32_t ends);
  ~VirtualNetwork();
  VirtualNetwork(const VirtualNetwork&) = delete;             // tables point into it
  VirtualNetwork& operator=(const VirtualNetwork&) = delete;  // tables point into it

  const putget_transport* table(uint32_t end) const;
  uint64_t now() const { return now_; }
  // When something happens next, or kNever.
  uint64_t next() const;
  // Lets all happen that is due by then, and moves the time there.
  void run_until(uint64_t time_ns);
  // The end sends nothing more, and nothing lands there. Writes under way from it are gone; those to it fail.
  void kill(uint32_t end);
  void on_arrival(std::function<void(const Arrival&)> look) { look_ = std::move(look); }
  // Writes whose source changed before they were over: a second try would have sent something else.
  uint64_t changed_sources() const { return changed_; }
  // Writes of an end that were told to have failed.
  uint64_t failed_writes(uint32_t end) const;

 private:
  struct Address;
  struct End;
  struct Flight;
  struct Event {
    uint64_t time;
    uint64_t order;
    uint32_t flight;
    uint32_t what;  // kArrive, kOver, kFail, or kPiece plus its number

    bool operator>(const Event& other) const { return time != other.time ? time > other.time : order > other.order; }
  };
  enum : uint32_t { kArrive = 0, kOver = 1, kFail = 2, kPiece = 3 };

  static int add_region(void* self, void* start, uint64_t bytes, int32_t device, uint32_t* region);
  static int describe_region(void* self, uint32_t region, uint8_t* description, uint64_t* bytes);
  static int address(void* self, uint8_t* address, uint64_t* bytes);
  static int add_peer(void* self, const uint8_t* address, uint64_t bytes, uint32_t* peer);
  static int add_target(void* self, uint32_t peer, const uint8_t* description, uint64_t bytes, uint32_t* target);
  static int counter_word(void* self, uint32_t imm, const uint64_t** word);
  static int write(void* self, const putget_transport_write* write);
  static int remove_region(void* self, uint32_t region);
  static const char* error(void* self);

  void at(uint64_t time, uint32_t flight, uint32_t what);
  void happen(const Event& event);
  void arrive(uint32_t flight);
  void land(uint32_t flight, uint32_t piece);
  void finish(uint32_t flight, bool failed);
  bool has_both_ends(const Flight& flight) const;
  uint64_t source_hash(const Flight& flight) const;
  const uint8_t* source(const Flight& flight) const;
  uint64_t draw(uint64_t below) { return below == 0 ? 0 : random_() % below; }

  const NetworkModel model_;
  std::vector<std::unique_ptr<End>> ends_;
  std::deque<Flight> flights_;
  std::vector<uint32_t> free_;
  std::priority_queue<Event, std::vector<Event>, std::greater<Event>> events_;
  std::function<void(const Arrival&)> look_;
  std::mt19937_64 random_;
  uint64_t now_ = 0;
  uint64_t order_ = 0;
  uint64_t changed_ = 0;
};

}  // namespace putget::proxy
