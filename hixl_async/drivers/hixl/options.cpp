#include "options.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sched.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "json.hpp"

namespace hx {

namespace {

bool whole(const std::string &text, uint64_t least, uint64_t most, uint64_t &out) {
    if (text.empty() || text.find_first_not_of("0123456789") != std::string::npos) return false;
    char *end = nullptr;
    errno = 0;
    out = std::strtoull(text.c_str(), &end, 10);
    return errno == 0 && *end == '\0' && out >= least && out <= most;
}

struct Setting {
    const char *key;
    uint64_t least, most;
    void (*set)(Options &, uint64_t);
};

constexpr Setting SETTINGS[] = {
    {"hixl_port", 0, 65535, [](Options &o, uint64_t v) { o.port = static_cast<uint16_t>(v); }},
    {"device", 0, 1 << 20, [](Options &o, uint64_t v) { o.device = static_cast<int32_t>(v); }},
    {"connect_timeout_ms", 1, 3600000, [](Options &o, uint64_t v) { o.connect_timeout_ms = static_cast<int32_t>(v); }},
    {"notify_timeout_ms", 1, 3600000, [](Options &o, uint64_t v) { o.notify_timeout_ms = static_cast<int32_t>(v); }},
    {"busy_ms", 0, 3600000, [](Options &o, uint64_t v) { o.busy_ms = v; }},
    {"spin_us", 0, 1000000, [](Options &o, uint64_t v) { o.spin_us = v; }},
    {"poll_max_us", 1, 1000000, [](Options &o, uint64_t v) { o.poll_max_us = v; }},
    {"notes_poll_ms", 1, 1000, [](Options &o, uint64_t v) { o.notes_poll_ms = v; }},
    {"in_flight", 1, 4096, [](Options &o, uint64_t v) { o.in_flight = static_cast<uint32_t>(v); }},
    {"request_descriptors", 1, 65536, [](Options &o, uint64_t v) { o.request_descriptors = static_cast<uint32_t>(v); }},
    {"pending_notes", 1, 1 << 30, [](Options &o, uint64_t v) { o.pending_notes = v; }},
    {"threads", 2, 1024, [](Options &o, uint64_t v) { o.threads = static_cast<uint32_t>(v); }},
};

struct Choice {
    const char *key;
    std::vector<const char *> words;
    void (*set)(Options &, size_t);
};

const std::vector<Choice> &choices() {
    static const std::vector<Choice> all = {
        {"backend", {"auto", "comm", "cs", "fab"}, [](Options &o, size_t i) { o.backend = static_cast<Backend>(i); }},
        {"notify_via", {"hixl", "control"}, [](Options &o, size_t i) { o.notify_control = i == 1; }},
        {"connect_via", {"threads", "async"}, [](Options &o, size_t i) { o.connect_async = i == 1; }},
    };
    return all;
}

// Keys of Initialize; the adxl forms are aliases of the same.
constexpr const char *HIXL_KEYS[] = {
    "BufferPool",         "GlobalResourceConfig",  "AutoConnect",           "LocalCommRes",
    "EnableUseFabricMem", "RdmaTrafficClass",      "RdmaServiceLevel",      "adxl.BufferPool",
    "adxl.LocalCommRes",  "adxl.RdmaTrafficClass", "adxl.RdmaServiceLevel",
};

// Keys of GlobalResourceConfig that are numbers.
struct Range {
    const char *key;
    double least, most;
};
constexpr Range RANGES[] = {
    {"fabric_memory.max_capacity", 1, 1024},
    {"fabric_memory.start_address", 0, 1024},
    {"fabric_memory.task_stream_num", 1, 8},
    {"connect_pool.thread_num", 1, 64},
    {"connect_pool.task_queue_capacity", 1, 65535},
    {"comm_resource_config.listen_port", 1, 65535},
    {"comm_resource_config.qos", 0, 7},
    {"comm_resource_config.max_active_channels", 1, 4294967295.0},
    {"channel_pool.max_channel", 1, 512},
};
constexpr const char *PROTOCOLS[] = {"roce:device",   "hccs:device", "ub_ctp:device", "uboe:device",
                                     "ub_rtp:device", "roce:host",   "ub_ctp:host"};

bool known_protocol(const Json &value) {
    if (value.kind != Json::STRING) return false;
    for (const char *name : PROTOCOLS)
        if (value.text == name) return true;
    return false;
}

// Empty, or what is wrong with one field of GlobalResourceConfig.
std::string field_problem(const std::string &key, const Json &value) {
    for (const Range &range : RANGES) {
        if (key != range.key) continue;
        double number;
        if (!value.number(number) || number != static_cast<double>(static_cast<int64_t>(number)) || number < range.least
            || number > range.most)
            return key + " must be a whole number from " + std::to_string(static_cast<int64_t>(range.least)) + " to "
                   + std::to_string(static_cast<int64_t>(range.most));
        return "";
    }
    if (key == "fabric_memory.enable_aicpu_unfold")
        return value.kind == Json::BOOLEAN ? "" : key + " must be true or false";
    if (key == "local_comm_res_path")
        return value.kind == Json::STRING && !value.text.empty() ? "" : key + " must be a path";
    if (key == "channel_pool.high_waterline" || key == "channel_pool.low_waterline") {
        double number;
        return value.number(number) && number > 0 && number < 1 ? "" : key + " must lie between 0 and 1";
    }
    if (key == "comm_resource_config.protocol_desc") {
        bool fine = value.kind == Json::LIST || known_protocol(value);
        for (const Json &item : value.items) fine = fine && known_protocol(item);
        if (fine) return "";
        std::string out = key + " must be one or a list of";
        for (const char *name : PROTOCOLS) out += std::string(" ") + name;
        return out;
    }
    std::string out = "there is no " + key;
    out +=
        "; there are fabric_memory.enable_aicpu_unfold local_comm_res_path channel_pool.high_waterline "
        "channel_pool.low_waterline comm_resource_config.protocol_desc";
    for (const Range &range : RANGES) out += std::string(" ") + range.key;
    return out;
}

std::string resources_problem(const std::string &text) {
    if (text.empty()) return "";
    Json config;
    std::string error;
    if (!Json::parse(text, config, error)) return "it is no JSON: " + error;
    if (config.kind != Json::OBJECT) return "it must be a JSON object";
    Json flat;
    for (const auto &entry : config.fields) {
        if (entry.first == "fabric_memory" && entry.second.kind == Json::OBJECT)
            for (const auto &nested : entry.second.fields)
                flat.fields.emplace_back("fabric_memory." + nested.first, nested.second);
        else flat.fields.push_back(entry);
    }
    for (const auto &entry : flat.fields) {
        const std::string problem = field_problem(entry.first, entry.second);
        if (!problem.empty()) return problem;
    }
    const Json *streams = flat.field("fabric_memory.task_stream_num"),
               *unfold = flat.field("fabric_memory.enable_aicpu_unfold");
    double number = 1;
    if (streams != nullptr && streams->number(number) && number != 1 && (unfold == nullptr || unfold->truth))
        return "fabric_memory.task_stream_num must be 1 unless fabric_memory.enable_aicpu_unfold is false";
    const Json *high = flat.field("channel_pool.high_waterline"), *low = flat.field("channel_pool.low_waterline");
    const bool most = flat.field("channel_pool.max_channel") != nullptr;
    if ((high == nullptr) != (low == nullptr) || (most && high == nullptr))
        return "channel_pool.max_channel, channel_pool.high_waterline and channel_pool.low_waterline belong together";
    double upper = 1, lower = 0;
    if (high != nullptr && high->number(upper) && low->number(lower) && upper <= lower)
        return "channel_pool.high_waterline must be above channel_pool.low_waterline";
    return "";
}

// Empty, or what is wrong with the value of one of HIXL's own keys.
std::string hixl_problem(const std::string &key, const std::string &value) {
    const std::string name = key.rfind("adxl.", 0) == 0 ? key.substr(5) : key;
    uint64_t number;
    if (name == "AutoConnect") return value == "0" || value == "1" ? "" : "it must be 0 or 1";
    if (name == "EnableUseFabricMem") return value.empty() || value == "0" || value == "1" ? "" : "it must be 0 or 1";
    if (name == "RdmaTrafficClass")
        return value.empty() || (whole(value, 0, 255, number) && number % 4 == 0)
                   ? ""
                   : "it must be a multiple of 4 from 0 to 255";
    if (name == "RdmaServiceLevel")
        return value.empty() || whole(value, 0, 7, number) ? "" : "it must be a whole number from 0 to 7";
    if (name == "BufferPool") {
        const size_t colon = value.find(':');
        uint64_t count, size;
        const bool fine = colon != std::string::npos && whole(value.substr(0, colon), 0, UINT32_MAX, count)
                          && whole(value.substr(colon + 1), 0, UINT32_MAX, size) && (count == 0) == (size == 0);
        return fine ? "" : "it must be COUNT:MIB, or 0:0 for none";
    }
    if (name == "GlobalResourceConfig") return resources_problem(value);
    if (name == "LocalCommRes") {
        Json res;
        std::string error;
        if (value.empty()) return "";
        if (!Json::parse(value, res, error)) return "it is no JSON: " + error;
        const Json *version = res.field("version");
        return version != nullptr && version->kind == Json::STRING
                   ? ""
                   : "it must be a JSON object with a version, such as {\"version\":\"1.3\"}";
    }
    return "";
}

std::string list_of_keys() {
    std::string out = "library hixl_ip";
    for (const Setting &setting : SETTINGS) out += std::string(" ") + setting.key;
    for (const Choice &choice : choices()) out += std::string(" ") + choice.key;
    for (const char *key : HIXL_KEYS) out += std::string(" ") + key;
    return out;
}

int cpus() {
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

// Not all addresses, none, or those of a group.
bool of_one_machine(const std::string &ip) {
    struct in_addr four;
    struct in6_addr six;
    if (inet_pton(AF_INET6, ip.c_str(), &six) == 1) {
        if (!IN6_IS_ADDR_V4MAPPED(&six)) return !IN6_IS_ADDR_UNSPECIFIED(&six) && !IN6_IS_ADDR_MULTICAST(&six);
        std::memcpy(&four, six.s6_addr + 12, sizeof four);
    } else inet_pton(AF_INET, ip.c_str(), &four);
    const uint32_t number = ntohl(four.s_addr);
    return number >> 24 != 0 && !IN_MULTICAST(number) && number != INADDR_BROADCAST;
}

// "": it was taken; else what is wrong.
std::string take(Options &out, const std::string &key, const std::string &value) {
    if (key == "library") {
        out.library = value;
        return value.empty() ? "it must be a file or a folder" : "";
    }
    if (key == "hixl_ip") {
        out.ip = value;
        if (!valid_address(address_text(value, 1)))
            return "it must be a literal IPv4 or IPv6 address, for HIXL asks no name server";
        return of_one_machine(value) ? "" : "it must be an address of this machine that peers can connect to";
    }
    for (const Setting &setting : SETTINGS) {
        if (key != setting.key) continue;
        uint64_t number;
        if (!whole(value, setting.least, setting.most, number))
            return "it must be a whole number from " + std::to_string(setting.least) + " to "
                   + std::to_string(setting.most);
        setting.set(out, number);
        return "";
    }
    for (const Choice &choice : choices()) {
        if (key != choice.key) continue;
        std::string words;
        for (size_t i = 0; i < choice.words.size(); i++) {
            if (value == choice.words[i]) {
                choice.set(out, i);
                return "";
            }
            words += std::string(i == 0 ? "" : ", ") + choice.words[i];
        }
        return "it must be one of " + words;
    }
    for (const char *name : HIXL_KEYS) {
        if (key != name) continue;
        out.hixl[key] = value;
        return hixl_problem(key, value);
    }
    return "there is no such option; there are " + list_of_keys();
}

}  // namespace

bool valid_address(const std::string &text) {
    const size_t colon = text.rfind(':');
    uint64_t port;
    if (colon == std::string::npos || !whole(text.substr(colon + 1), 1, 65535, port)) return false;
    std::string ip = text.substr(0, colon);
    unsigned char space[sizeof(struct in6_addr)];
    if (ip.size() > 2 && ip.front() == '[' && ip.back() == ']')
        return inet_pton(AF_INET6, ip.substr(1, ip.size() - 2).c_str(), space) == 1;
    return inet_pton(AF_INET, ip.c_str(), space) == 1;
}

std::string address_text(const std::string &ip, uint16_t port) {
    return (ip.find(':') != std::string::npos ? "[" + ip + "]" : ip) + ":" + std::to_string(port);
}

bool Options::fabric() const {
    const auto known = hixl.find("EnableUseFabricMem");
    return known != hixl.end() && known->second == "1";
}

int Options::parse(const hxa_option *options, size_t n, std::string &error) {
    if (cpus() < 2) spin_us = 0;  // whoever spins keeps the others from what it waits for
    for (size_t i = 0; i < n; i++) {
        const std::string key = options[i].key, value = options[i].value;
        const std::string problem = take(*this, key, value);
        if (problem.empty()) continue;
        error = "hixl: " + key + "=" + value.substr(0, 60) + ": " + problem;
        return -HXA_E_INVALID;
    }
    // A back-end asked for by name is a default for the options that choose it.
    const bool resources = hixl.count("LocalCommRes") != 0 || hixl.count("adxl.LocalCommRes") != 0;
    if (backend == Backend::CS && !resources) hixl["LocalCommRes"] = "{\"version\":\"1.3\"}";
    if (backend == Backend::FAB) hixl.emplace("EnableUseFabricMem", "1");
    // TransferSync alone uses the pool, and this driver never calls it: it would only cost 64 MiB of the NPU.
    if (hixl.count("BufferPool") == 0 && hixl.count("adxl.BufferPool") == 0) hixl["BufferPool"] = "0:0";
    return 0;
}

}  // namespace hx
